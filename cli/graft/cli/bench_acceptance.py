"""`graft bench acceptance`: accept length of every drafter there is for a target."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import uvloop
import yaml

from graft.bench import machine, prompts
from graft.bench.prompts import Prompt
from graft.cli.bench_screen import (
    Config,
    Json,
    Limit,
    MaxTokens,
    Model,
    Prompts,
    Report,
    Seed,
    Threads,
    console,
    facts,
    finish,
    progress_of,
    say,
)
from graft.common.errors import GraftError, InvalidArgument
from graft.common.model_files import EMBEDDED
from graft.draft.shipped import shipped_for

if TYPE_CHECKING:
    from graft.bench.accept_length import Acceptance, Way
    from graft.bench.peer_acceptance import Asked

_TREE_DEADLINE_MS = 10_000
_STALL_S = 600.0
_TRAINED = ("eagle3", "mtp", "dflash")
_MERGED = "eagle3+ngram"


class Features(Enum):
    """How hidden states travel, and whether verify applies the drafter's projection before."""

    BF16 = "bf16"
    INT8 = "int8"
    BF16_FUSED = "bf16-fused"
    INT8_FUSED = "int8-fused"

    @property
    def codec(self) -> str:
        """As --feature-codec takes it."""
        return self.value.removesuffix("-fused")

    @property
    def fused(self) -> bool:
        """True when verify projects."""
        return self.value != self.codec


def run_acceptance(
    model: Model = EMBEDDED,
    eagle3: Annotated[str, typer.Option(help="EAGLE-3 checkpoint; ours by default.")] = "",
    mtp: Annotated[str, typer.Option(help="MTP checkpoint; ours by default.")] = "",
    dflash: Annotated[str, typer.Option(help="DFlash checkpoint; ours by default.")] = "",
    only: Annotated[
        str, typer.Option(help="Drafters to measure, joined by commas; all by default.")
    ] = "",
    precision: Annotated[str, typer.Option(help="fp32, q8_0, q4_1 or auto.")] = "fp32",
    features: Annotated[
        Features | None,
        typer.Option(help="How hidden states travel; fused ones behind EAGLE-3's projection."),
    ] = None,
    vllm: Annotated[
        bool, typer.Option("--vllm", help="Run the EAGLE-3 checkpoint in vLLM's CPU build too.")
    ] = False,
    prompts_file: Prompts = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    seed: Seed = 0,
    clients: Annotated[int, typer.Option(min=1, help="Questions asked at a time.")] = 4,
    threads: Threads = 0,
    config: Config = None,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Tokens of a target's forward with each drafter; starts its own services.

    A limit takes as many questions of every category.
    """
    from graft.bench.accept_length import DRAFTERS

    wanted = [word.strip() for word in only.split(",") if word.strip()] or list(DRAFTERS)
    for name in wanted:
        if name not in DRAFTERS:
            raise InvalidArgument(
                f"unknown drafter {name!r}, expected some of {', '.join(DRAFTERS)}", field="only"
            )
    lineup = _lineup(model, {"eagle3": eagle3, "mtp": mtp, "dflash": dflash}, wanted)
    for name, why in lineup.absent.items():
        console.print(f"{name} is left out: {why}", highlight=False, markup=False)
    if features is not None and features.fused and set(lineup.checkpoints) != {"eagle3"}:
        raise InvalidArgument(
            f"features {features.value} needs --only eagle3: verify applies one projection",
            field="features",
        )
    if vllm and "eagle3" not in lineup.checkpoints:
        raise InvalidArgument(
            "--vllm runs an EAGLE-3 checkpoint, and none is measured", field="vllm"
        )
    if not lineup.ways:
        raise InvalidArgument("no drafter is left to measure", field="only")
    questions = prompts.from_all_categories(prompts.read(prompts_file), limit)
    head = facts(
        {
            "model": model,
            "precision": precision,
            **({} if features is None else {"features": features.value}),
            "questions": f"{len(questions)} of {prompts_file or 'our own'}",
            "seed": str(seed),
            **{f"{name} checkpoint": path for name, path in lineup.checkpoints.items()},
        }
    )
    start = _Start(
        model, precision, threads or machine.cores(), config, max_tokens, seed, clients, features
    )
    with progress_of("answers", (len(lineup.ways) + vllm) * len(questions)) as advance:
        found, asked = uvloop.run(_measure(start, lineup, questions, advance))
        if vllm:
            checkpoint = lineup.checkpoints["eagle3"]
            found = uvloop.run(_with_vllm(found, start, checkpoint, asked, advance))
    finish(found.page(head), report, as_json, tables=3)


@dataclass(frozen=True, slots=True)
class Lineup:
    """Drafters that can be measured, and why the others cannot."""

    ways: tuple[Way, ...]
    checkpoints: Mapping[str, str]
    absent: Mapping[str, str]
    multi_layer: bool = False

    @property
    def draft_settings(self) -> dict[str, Any]:
        """Of a draft service that has them all."""
        names = dict.fromkeys([*self.checkpoints, *(way.drafter for way in self.ways)])
        sources = {**self.checkpoints, "merged": _MERGED}
        proposers = [f"{name}={sources[name]}" if name in sources else name for name in names]
        settings: dict[str, Any] = {"proposers": proposers, "stall_s": _STALL_S}
        if self.multi_layer:
            settings["enable_multi_layer_eagle"] = True
        return settings


@dataclass(frozen=True, slots=True)
class _Start:
    model: str
    precision: str
    threads: int
    config: Path | None
    max_tokens: int
    seed: int
    clients: int
    features: Features | None


def _lineup(model: str, given: Mapping[str, str], wanted: Sequence[str]) -> Lineup:
    """What there is of `wanted`. given: checkpoints by hand; "" takes ours."""
    from graft.bench.accept_length import OWN_TIER, WAYS, Way

    checkpoints, absent = {}, {}
    ours = {one.proposer: str(one.folder) for one in shipped_for(model)}
    for name in _TRAINED:
        path = given[name] or ours.get(name, "")
        if path:
            checkpoints[name] = path
        else:
            absent[name] = f"no checkpoint is named, and none for {model} comes with Graft"
    if "eagle3" in absent:
        absent["merged"] = "it merges NGRAM with an EAGLE-3 drafter"
    multi_layer = False
    if "mtp" in checkpoints and "mtp" in wanted:
        from graft.draft.checkpoints.check import switches

        multi_layer = bool(switches(checkpoints["mtp"]))
    ways = [way for way in WAYS if way.drafter in wanted and way.drafter not in absent]
    if multi_layer:
        # One layer a token ahead makes chains of its own length and nothing else.
        ways = [Way(way.drafter, OWN_TIER) if way.drafter == "mtp" else way for way in ways]
        ways = list({(way.drafter, way.temperature, str(way.tier)): way for way in ways}.values())
    return Lineup(
        tuple(ways),
        {
            name: path
            for name, path in checkpoints.items()
            if name in wanted or (name == "eagle3" and "merged" in wanted)
        },
        {name: why for name, why in absent.items() if name in wanted},
        multi_layer,
    )


async def _with_vllm(
    found: Acceptance,
    start: _Start,
    checkpoint: str,
    questions: Sequence[Asked],
    advance: Callable[[], None],
) -> Acceptance:
    """The same questions to vLLM, or why it could not answer them."""
    from graft.bench.peer_acceptance import VLLM_EAGLE3, measure_vllm, vllm_run

    say("starting vllm", 0.0)
    try:
        run = vllm_run(start.model, checkpoint, start.threads)
        theirs = await measure_vllm(run, questions, max_tokens=start.max_tokens, on_answer=advance)
    except GraftError as error:
        return replace(found, absent={**found.absent, VLLM_EAGLE3: str(error)})
    return replace(found, measured=(*found.measured, theirs))


async def _measure(
    start: _Start, lineup: Lineup, questions: Sequence[Prompt], advance: Callable[[], None]
) -> tuple[Acceptance, list[Asked]]:
    """Also the questions in token ids."""
    from graft.bench.accept_length import measure
    from graft.bench.ask import Client
    from graft.bench.peer_acceptance import Asked
    from graft.bench.services import Setup, running

    content: dict[str, Any] = {}
    if start.config is not None:
        content = yaml.safe_load(start.config.read_text()) or {}
    content["draft"] = {**(content.get("draft") or {}), **lineup.draft_settings}
    features = start.features
    if features is not None:
        content["draft"] |= {"feature_codec": features.codec, "feature_fused": features.fused}
    # Trees are to be what was asked for, whatever they cost.
    content["verify"] = {**(content.get("verify") or {}), "trim_trees": False}
    content["gateway"] = {
        **(content.get("gateway") or {}),
        "tree_deadline_ms": _TREE_DEADLINE_MS,
        "tiers": "fixed",
    }
    with tempfile.TemporaryDirectory() as folder:
        if features is not None and features.fused:
            from graft.draft.checkpoints.fuse import write_fused

            projection = Path(folder) / "fused.safetensors"
            write_fused(lineup.checkpoints["eagle3"], start.model, projection)
            content["verify"]["fused_features"] = str(projection)
        file = Path(folder) / "acceptance.yaml"
        file.write_text(yaml.safe_dump(content))
        say("starting the services", 0.0)
        setup = Setup(start.model, start.precision, start.threads, file)
        async with running(setup) as addresses:
            async with Client(addresses.url) as client:
                asked = [Asked(await client.tokenize(one.text), one.category) for one in questions]
            found = await measure(
                addresses.url,
                lineup.ways,
                questions,
                max_tokens=start.max_tokens,
                clients=start.clients,
                seed=start.seed,
                absent=lineup.absent,
                on_answer=advance,
            )
    return found, asked
