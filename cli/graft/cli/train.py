"""`graft train`: a drafter for a target, from the target's own answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from graft.common.model_files import EMBEDDED

_RESUMES = "Stages resume: run the same command again, and it goes on where it was stopped."


class Stage(StrEnum):
    """Parts of the work that can be run alone."""

    CORPUS = "corpus"
    TRAIN = "train"
    EVAL = "eval"
    ALL = "all"


class ProposerName(StrEnum):
    """What can be trained."""

    EAGLE3 = "eagle3"
    MTP = "mtp"
    DFLASH = "dflash"


def command(_name: str) -> typer.Typer:
    """`graft train`."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(epilog=_RESUMES)(run_train)
    return app


def run_train(
    out: Annotated[Path, typer.Option(help="Folder of the run: corpus, checkpoints, drafter.")],
    target: Annotated[
        str, typer.Option(help="Embedded name, Hugging Face id, folder or GGUF file.")
    ] = EMBEDDED,
    proposer: Annotated[ProposerName, typer.Option(help="What to train.")] = ProposerName.EAGLE3,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON lines with `prompt`, `turns`, `question` or `opening`; may be repeated. "
            "Ours by default."
        ),
    ] = None,
    synth: Annotated[
        int, typer.Option(min=0, help="Conversations whose user turn the target writes, too.")
    ] = 1200,
    answers_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 256,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 1024,
    tokens: Annotated[
        int, typer.Option(min=0, help="Close the corpus at so many tokens; 0 answers all.")
    ] = 0,
    draft_vocab: Annotated[
        int, typer.Option(min=1, help="Ids of the draft vocabulary, the most frequent.")
    ] = 8192,
    sessions: Annotated[int, typer.Option(min=1, help="Texts written at once.")] = 64,
    precision: Annotated[
        str, typer.Option(help="The target's, while it writes: fp32, q8_0, q4_1 or auto.")
    ] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="Threads of the target and of torch.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything that is drawn.")] = 0,
    steps: Annotated[
        int, typer.Option(min=0, help="Steps of training; 0 takes what the minutes allow.")
    ] = 0,
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes of training.")] = 60.0,
    rate: Annotated[
        float, typer.Option(min=0, help="Step size of matrices at its height; 0 takes ours.")
    ] = 0.0,
    start_from: Annotated[
        Path | None, typer.Option(help="Drafter to go on from, with a new schedule.")
    ] = None,
    stage: Annotated[Stage, typer.Option(help="Which part to run.")] = Stage.ALL,
    smoke: Annotated[
        bool, typer.Option(help="A small run of everything, to see that it works.")
    ] = False,
) -> None:
    """Train a drafter for a target on the target's own answers, in stages that resume."""
    from graft.cli.train_page import draw_training
    from graft.common import log
    from graft.train.author import Desk
    from graft.train.make_corpus import CorpusOrder, make_corpus
    from graft.train.prompts import OWN
    from graft.train.stage import TrainOrder, evaluate_drafter, train_drafter

    log.setup("train", "warning")
    corpus = CorpusOrder(
        out=out,
        desk=Desk(target, precision, threads, sessions),
        prompts=tuple(prompts or (OWN,)),
        synth=synth,
        seed=seed,
        tokens=tokens,
        answer_tokens=answers_tokens,
        max_prompt_tokens=prompt_tokens,
        draft_vocab=draft_vocab,
    )
    training = TrainOrder(
        target=target,
        out=out,
        proposer=proposer.value,
        seed=seed,
        steps=steps,
        minutes=minutes,
        threads=threads,
        start_from=start_from,
    )
    if rate:
        training = replace(training, loop=replace(training.loop, rate=rate))
    if smoke:
        corpus, training = _small_corpus(corpus), _small_training(training)
    with _teller() as teller:
        if stage in (Stage.CORPUS, Stage.ALL):
            make_corpus(corpus, teller)
        if stage in (Stage.TRAIN, Stage.ALL):
            folder = train_drafter(training, teller)
            draw_training(folder)
            teller.say(f"the drafter is in {folder}, its curves in {folder / 'training.html'}")
        if stage in (Stage.EVAL, Stage.ALL):
            for name, figure in evaluate_drafter(training, teller).items():
                teller.say(f"{name}: {figure:.4f}")


def _small_corpus(order: Any) -> Any:
    desk = replace(order.desk, sessions=16, kv_tokens=8192)
    return replace(
        order,
        desk=desk,
        synth=16,
        answer_tokens=48,
        max_prompt_tokens=160,
        shard_prompts=8,
        tokens=12_000,
    )


def _small_training(order: Any) -> Any:
    """Small networks want larger steps."""
    loop = replace(order.loop, rate=2e-2, accumulate=1)
    return replace(order, steps=order.steps or 200, window=64, windows=4, half=False, loop=loop)


class BarTeller:
    """A bar with an estimate on stderr, and lines above it; one stage at a time."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def begin(self, what: str, total: float, done: float) -> None:
        """The former stage's bar stays as it is."""
        self._task = self._progress.add_task(what, total=total, completed=int(done), note="")

    def advance(self, units: float, note: str) -> None:
        """More of it is done."""
        assert self._task is not None, "a stage begins before it advances"
        self._progress.update(self._task, advance=units, note=note)

    def say(self, line: str) -> None:
        """A line that stays."""
        self._progress.console.print(line, highlight=False, markup=False)


@contextmanager
def _teller() -> Iterator[BarTeller]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield BarTeller(progress)
