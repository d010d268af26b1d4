"""`graft bench parity` and `serve`: a running gateway, asked as clients ask it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
import uvloop

from graft.bench import parity, prompts, serve
from graft.bench.ask import Question
from graft.bench.latency import Goal
from graft.cli.bench_screen import (
    ApiKey,
    Json,
    Limit,
    MaxTokens,
    Prompts,
    Report,
    Seed,
    Temperature,
    Url,
    facts,
    finish,
    print_json,
    progress_of,
)

_URL = "http://127.0.0.1:8000"


def run_parity(
    url: Url = _URL,
    prompts_file: Prompts = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Questions asked at a time.")] = 1,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Ask with speculation on and off; exit 1 when a text differs."""
    questions = prompts.read(prompts_file, limit)
    with progress_of("equal so far", len(questions) * len(parity.LAWS)) as advance:
        report = uvloop.run(
            parity.run(
                url,
                questions,
                max_tokens=max_tokens,
                concurrency=concurrency,
                api_key=api_key,
                on_pair=lambda _pair: advance(),
            )
        )
    for pair in report.pairs:
        if not pair.equal:
            place = f"character {pair.first_difference}"
            print(f"differs at {place}: T={pair.law.temperature:g} {pair.prompt.text[:60]!r}")
    print(
        f"{report.num_equal} of {len(report.pairs)} texts equal with speculation on and off, "
        f"accept length {report.accept_length:.2f}"
    )
    if as_json:
        print_json(report.as_json())
    if report.num_equal < len(report.pairs):
        sys.exit(1)


def run_serve(
    url: Url = _URL,
    prompts_file: Prompts = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests; one a question by default.")
    ] = None,
    clients: Annotated[int, typer.Option(min=1, help="Clients that ask one after another.")] = 1,
    rate: Annotated[
        float, typer.Option(min=0.0, help="Requests a second instead, whoever waits.")
    ] = 0.0,
    speculation: Annotated[
        str | None, typer.Option(help="auto, off or a proposer; the server's own by default.")
    ] = None,
    goal_ttft_ms: Annotated[
        float | None, typer.Option(help="Goodput counts answers whose first token came in time,")
    ] = None,
    goal_tpot_ms: Annotated[
        float | None, typer.Option(help="whose further tokens took no longer each,")
    ] = None,
    goal_e2e_ms: Annotated[float | None, typer.Option(help="and that were whole in time.")] = None,
    api_key: ApiKey = None,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Load on a running gateway: percentiles of TTFT, TPOT, ITL and E2E, and goodput."""
    questions = [
        Question(prompt.text, max_tokens, temperature, seed, speculation)
        for prompt in prompts.read(prompts_file, limit)
    ]
    load = serve.Load(requests or len(questions), clients, rate, seed)
    limits = (goal_ttft_ms, goal_tpot_ms, goal_e2e_ms)
    goal = Goal(*(None if limit is None else limit / 1e3 for limit in limits))
    head = facts({"gateway": url, "temperature": f"{temperature:g}"})
    with progress_of(load.words, load.num_requests) as advance:
        served = uvloop.run(
            serve.run(
                url,
                questions,
                load,
                goal=goal,
                api_key=api_key,
                on_answer=lambda _answer: advance(),
            )
        )
    answer = served.as_json()
    print(
        f"{answer['requests'] - answer['failed']} of {answer['requests']} answered in "
        f"{answer['seconds']:g} s, {answer['tokens_per_s']:g} tokens/s, "
        f"goodput {answer['goodput_requests_per_s']:g} requests/s"
    )
    finish(served.page(head), report, as_json)
