"""`graft bench compare`: this project beside the systems that a user might pick instead."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import uvloop

from graft.bench import machine, prompts
from graft.bench.peers.catalog import NAMES, peer_of
from graft.cli.bench_cost import precisions_of
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
    console,
    facts,
    finish,
    progress_of,
    say,
)
from graft.common.model_files import EMBEDDED
from graft.draft.shipped import shipped_for

if TYPE_CHECKING:
    from graft.bench.compare import Comparison
    from graft.bench.lineup import Wanted


def run_compare(
    model: Model = EMBEDDED,
    precision: Annotated[str, typer.Option(help="Our precisions, joined by commas.")] = "fp32,q4_1",
    peers: Annotated[
        str, typer.Option(help="Peers, joined by commas; those that are not there are skipped.")
    ] = ",".join(NAMES),
    install: Annotated[
        str, typer.Option(help="Peers to install first, each into its own environment.")
    ] = "",
    eagle3: Annotated[
        str, typer.Option(help="Checkpoint for vLLM's EAGLE-3; ours for the model by default.")
    ] = "",
    prompts_file: Prompts = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    clients: Annotated[int, typer.Option(min=1, help="Prompts asked at a time.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each prompt is asked.")] = 1,
    threads: Threads = 0,
    config: Config = None,
    peers_folder: Annotated[
        Path | None, typer.Option(help="Where peers are installed; ~/.cache/graft/peers.")
    ] = None,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Tokens/s of this project and of its peers, prompt by prompt in one run."""
    from graft.bench.lineup import Wanted

    wanted = Wanted(
        model,
        precisions_of(precision),
        [peer_of(name).name for name in _names(peers)],
        threads or machine.cores(),
        [peer_of(name).name for name in _names(install)],
        str(Path(eagle3).expanduser().resolve()) if eagle3 else _shipped_eagle3(model),
        config,
        peers_folder,
    )
    head = facts(
        {
            "model": model,
            "threads": str(wanted.threads),
            "answers": f"at most {max_tokens} tokens, T = {temperature:g}",
        }
    )
    questions = prompts.read(prompts_file, limit)
    law = (max_tokens, temperature, seed)
    comparison = uvloop.run(_compare(wanted, questions, law, clients, repeats))
    finish(comparison.page(head), report, as_json)


async def _compare(
    wanted: Wanted,
    questions: list[prompts.Prompt],
    law: tuple[int, float, int],
    clients: int,
    repeats: int,
) -> Comparison:
    from graft.bench import compare
    from graft.bench.lineup import lineup
    from graft.bench.systems import Job

    async with lineup(wanted, say) as up:
        for line in up.skipped:
            console.print(line, highlight=False, markup=False)
        asked = [
            compare.Asked(Job(await up.client.tokenize(prompt.text), *law), prompt.category)
            for prompt in questions
        ]
        able = sum(system.most_clients >= clients for system in up.systems)
        blocks = -(-len(asked) // clients)
        with progress_of("blocks", able * (blocks * repeats + 1)) as advance:
            return await compare.measure(
                up.systems,
                asked,
                clients=clients,
                repeats=repeats,
                skipped=up.skipped,
                on_block=advance,
            )


def _shipped_eagle3(model: str) -> str:
    """The checkpoint that comes with Graft for this target, or nothing."""
    ours = {one.proposer: one.folder for one in shipped_for(model)}
    return str(ours.get("eagle3", ""))


def _names(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]
