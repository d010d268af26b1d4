"""`graft bench verify-cost` and `rounds`: what a target's step costs, and what the split adds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import uvloop

from graft.bench import machine, prompts
from graft.cli.bench_screen import (
    Config,
    Json,
    Limit,
    MaxTokens,
    Model,
    Prompts,
    Report,
    Seed,
    Temperature,
    Threads,
    facts,
    finish,
    progress_of,
    say,
)
from graft.common.errors import InvalidArgument
from graft.common.model_files import EMBEDDED

if TYPE_CHECKING:
    from graft.bench.split import Split
    from graft.models.storage import Precision


def run_verify_cost(
    model: Model = EMBEDDED,
    precision: Annotated[
        str, typer.Option(help="Precisions, joined by commas: fp32, q8_0, q4_1 or auto.")
    ] = "fp32,q4_1",
    rows: Annotated[str, typer.Option(help="Row counts, joined by commas.")] = "1,2,4,8,16,32",
    context: Annotated[int, typer.Option(min=1, help="Cached tokens before the rows.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each is measured.")] = 9,
    threads: Threads = 0,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Milliseconds of a target forward against its rows, and the bandwidth it is bound by."""
    counts = _counts(rows)
    kinds = precisions_of(precision)
    from graft.bench import verify_cost

    threads = threads or machine.cores()
    head = facts({"model": model, "threads": str(threads), "context": f"{context} tokens"})
    with progress_of("rounds", rounds + 1) as advance:
        cost = verify_cost.run(
            model,
            kinds,
            threads=threads,
            rounds=rounds,
            rows=counts,
            context=context,
            on_round=advance,
        )
    print(f"streaming bandwidth {cost.stream_gb_s:.1f} GB/s")
    finish(cost.page(head), report, as_json, tables=2)


def run_rounds(
    model: Model = EMBEDDED,
    precision: Annotated[str, typer.Option(help="fp32, q8_0, q4_1 or auto.")] = "fp32",
    prompts_file: Prompts = None,
    limit: Limit = 8,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    threads: Threads = 0,
    config: Config = None,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Where a round's time goes: in services of its own, in one process, before a gateway."""
    questions = [prompt.text for prompt in prompts.read(prompts_file, limit)]
    kind = precisions_of(precision)[0]
    threads = threads or machine.cores()
    head = facts({"model": model, "precision": precision, "threads": str(threads)})
    law = {"temperature": temperature, "seed": seed}
    split = uvloop.run(_rounds(questions, max_tokens, law, model, kind.value, threads, config))
    finish(split.page(head), report, as_json)


async def _rounds(
    questions: Sequence[str],
    max_tokens: int,
    law: dict[str, Any],
    model: str,
    precision: str,
    threads: int,
    config: Path | None,
) -> Split:
    from graft.bench import split
    from graft.bench.ask import Client
    from graft.bench.direct import paired
    from graft.bench.one_process import load_one
    from graft.bench.services import Setup, running
    from graft.common.sampling import Sampling

    say("starting the services", 0.0)
    # Both sides draft alike: with what the draft service's settings name.
    setup = Setup(model, precision, threads, config, trained_drafter=False)
    async with running(setup) as addresses:
        async with Client(addresses.url) as client:
            tokens = [await client.tokenize(question) for question in questions]
            say("loading the same target here", 0.0)
            one = load_one(model, precision, threads, config)
            async with paired(addresses.verify, addresses.draft) as pair:
                with progress_of("passages", 2 * (len(tokens) + 1)) as advance:
                    return await split.measure(
                        pair, one, client, tokens, max_tokens, Sampling(**law), advance
                    )


def precisions_of(words: str) -> list[Precision]:
    """Precisions of a comma-separated list.

    Raises:
        InvalidArgument: one is unknown.
    """
    from graft.models.storage import Precision

    try:
        return [Precision(word.strip()) for word in words.split(",")]
    except ValueError:
        known = ", ".join(precision.value for precision in Precision)
        raise InvalidArgument(
            f"precision is {words!r}, expected some of {known}", field="precision"
        ) from None


def _counts(words: str) -> list[int]:
    try:
        counts = [int(word) for word in words.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise InvalidArgument(f"rows are {words!r}, expected numbers like 1,4,8", field="rows")
    return sorted(set(counts))
