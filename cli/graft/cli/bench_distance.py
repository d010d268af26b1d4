"""`graft bench distance`: goodput against the distance between draft and verify."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
import uvloop

from graft.bench import prompts
from graft.cli.bench_screen import (
    Json,
    Limit,
    MaxTokens,
    Model,
    Prompts,
    Report,
    Seed,
    Temperature,
    facts,
    finish,
    progress_of,
    say,
)
from graft.common.errors import InvalidArgument
from graft.common.model_files import EMBEDDED
from graft.common.sampling import Sampling

if TYPE_CHECKING:
    from graft.bench.distance import Distance
    from graft.bench.two_cores import Cores


def run_distance(
    model: Model = EMBEDDED,
    precision: Annotated[str, typer.Option(help="fp32, q8_0, q4_1 or auto.")] = "fp32",
    proposer: Annotated[
        str, typer.Option(help="What drafts, as for `graft draft --proposers`.")
    ] = "ngram",
    lookahead: Annotated[
        int, typer.Option(min=1, max=63, help="Outcomes that look-ahead prepares.")
    ] = 24,
    num_steps: Annotated[int, typer.Option(min=0, help="Depth; 0 is the proposer's own.")] = 0,
    topk: Annotated[int, typer.Option(min=0, help="Width; 0 is the proposer's own.")] = 0,
    num_draft_tokens: Annotated[
        int, typer.Option(min=0, help="Nodes, root included; 0 is the proposer's own.")
    ] = 0,
    draft_quantization: Annotated[
        str, typer.Option(help="As draft_model_quantization of `graft draft`.")
    ] = "none",
    prompts_file: Prompts = None,
    limit: Limit = 4,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    verify_core: Annotated[int, typer.Option(min=0, help="Core of the verify replica.")] = 0,
    draft_core: Annotated[int, typer.Option(min=0, help="Core of the draft replica.")] = 1,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Goodput at 0, 0.5, 1 and 2.5 verify times between draft and verify; starts its own two."""
    from graft.bench.two_cores import Cores

    here = os.sched_getaffinity(0)
    for core in (verify_core, draft_core):
        if core not in here:
            raise InvalidArgument(f"core {core} is not among {sorted(here)}", field="core")
    questions = [prompt.text for prompt in prompts.read(prompts_file, limit)]
    tier = {"num-steps": num_steps, "eagle-topk": topk, "num-draft-tokens": num_draft_tokens}
    flags = [f"--{name}={value}" for name, value in tier.items() if value]
    flags.append(f"--draft-model-quantization={draft_quantization}")
    cores = Cores(model, precision, proposer, verify_core, draft_core, tuple(flags))
    head = facts(
        {
            "model": f"{model}, {precision}",
            "proposer": " ".join([proposer, *flags]),
            "look-ahead": str(lookahead),
        }
    )
    sampling = Sampling(temperature=temperature, seed=seed)
    found = uvloop.run(_distance(cores, questions, max_tokens, sampling, lookahead))
    finish(found.page(head), report, as_json)


async def _distance(
    cores: Cores, questions: Sequence[str], max_tokens: int, sampling: Sampling, lookahead: int
) -> Distance:
    from graft.bench.direct import paired
    from graft.bench.distance import MODES, MULTIPLES, Wire, measure
    from graft.bench.two_cores import two_replicas
    from graft.common.model_files import resolve
    from graft.common.relay import Relay
    from graft.gateway.chat_template import ChatTemplate
    from graft.gateway.tokenizer import Tokenizer

    folder = resolve(cores.model, weights=False).folder
    tokenizer = Tokenizer(folder)
    template = ChatTemplate(tokenizer.chat_template)
    asked = [[{"role": "user", "content": question}] for question in questions]
    tokens = [tokenizer.encode(template.render(one), specials=False) for one in asked]
    say("starting the replicas", 0.0)
    async with two_replicas(cores) as replicas:
        relay = Relay(replicas.verify)
        via = await relay.start()
        try:
            async with paired(replicas.verify, replicas.draft, via) as pair:
                wire = Wire(pair, relay, replicas.sent, pair.tier, lookahead)
                total = len(tokens) * len(MODES) * len(MULTIPLES)
                with progress_of("passages", total) as advance:
                    return await measure(wire, tokens, max_tokens, sampling, advance)
        finally:
            await relay.stop()
