"""The training stage: from a corpus to a drafter, and on from where a former run stopped.

Settles once what a run is (`plan.json` beside its checkpoints), makes the laws, builds the
trainee and runs the loop. Knows the order of things; the parts know how.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from graft.common.errors import InvalidArgument
from graft.draft.checkpoints.borrowed import borrow
from graft.models.weights import FINAL_NORM
from graft.train.corpus import Corpus, SequenceRef, Split
from graft.train.files import json_bytes, write_whole
from graft.train.laws import LawMaker, LawTable, load_laws
from graft.train.loop import LoopOptions, Progress, evaluate, train
from graft.train.make_corpus import Teller
from graft.train.make_trainee import UnrollChoice, make_trainee
from graft.train.optimizer import Optimizer
from graft.train.trainee import Trainee
from graft.train.windows import Windows, WindowShape

_TIMED_STEPS = 2
# Keeping, looking at held-out text and neighbours on the machine take their part of the time.
_TIME_FOR_STEPS = 0.93


@dataclass(frozen=True, slots=True)
class TrainOrder:
    """What the training stage is asked for.

    steps: 0 takes as many as fit into `minutes` at the speed that is measured at the start.
    window, windows: rows of a window, windows of a batch. half: matrices in bfloat16.
    start_from: folder of a drafter to go on from, with a new schedule.
    """

    target: str
    out: Path
    proposer: str = "eagle3"
    seed: int = 0
    steps: int = 0
    minutes: float = 60.0
    window: int = 512
    windows: int = 4
    half: bool = True
    threads: int = 1
    start_from: Path | None = None
    loop: LoopOptions = field(default_factory=lambda: LoopOptions(steps=0, look_every=200))
    unroll: UnrollChoice = field(default_factory=UnrollChoice)

    @property
    def folder(self) -> Path:
        """Where the drafter, its checkpoints and its figures go."""
        return self.out / self.proposer


def train_drafter(order: TrainOrder, teller: Teller) -> Path:
    """Trains, or goes on training, and returns the folder of the drafter.

    Raises:
        InvalidArgument: no finished corpus, or a run with other settings is in the folder.
        GraftError: the target cannot be read.
    """
    bench = _bench(order, teller)
    options = _settle(order, bench)
    tokens = options.steps * options.accumulate * order.window * order.windows
    epochs = tokens / bench.windows.num_rows
    teller.begin(f"training {order.proposer}", options.steps, 0)
    teller.say(f"{options.steps} steps, {tokens} rows, {epochs:.1f} times the corpus")
    seen = 0

    def report(progress: Progress) -> None:
        nonlocal seen
        if progress.held:
            teller.say(f"step {progress.step}, held-out: {_line(progress.figures)}")
            return
        teller.advance(progress.step - seen, _line(progress.figures, ("loss", "agree_1")))
        seen = progress.step

    train(bench.trainee, bench.windows, bench.held, order.folder, options, report)
    return order.folder


def evaluate_drafter(order: TrainOrder, teller: Teller) -> dict[str, float]:
    """Figures of the newest checkpoint on held-out text.

    Raises:
        InvalidArgument: there is no checkpoint, or no corpus.
    """
    bench = _bench(order, teller)
    path = order.folder / "resume.pt"
    if bench.held is None or not path.is_file():
        raise InvalidArgument(f"{order.folder} holds no trained drafter", field="out")
    bench.trainee.load_state_dict(torch.load(path, weights_only=True)["weights"])
    figures = evaluate(bench.trainee, bench.held)
    write_whole(order.folder / "held.json", json_bytes(figures))
    return figures


@dataclass(frozen=True, slots=True, eq=False)
class _Bench:
    """What a run works with."""

    trainee: Trainee
    windows: Windows
    held: Windows | None
    corpus: Corpus


def _bench(order: TrainOrder, teller: Teller) -> _Bench:
    torch.set_num_threads(order.threads)
    corpus = Corpus(order.out / "corpus")
    borrowed = borrow(order.target)
    drafted = corpus.draft_vocab()
    torch.manual_seed(order.seed)
    dtype = torch.bfloat16 if order.half else torch.float32
    trainee = make_trainee(order.proposer, borrowed, corpus, dtype, order.unroll)
    if order.start_from is not None:
        trainee.read(order.start_from)
    head = borrowed.head_weight()[drafted]
    maker = LawMaker(borrowed.source.read(FINAL_NORM), head, borrowed.config.rms_norm_eps)
    shape = WindowShape(order.window, trainee.margin, order.windows)

    def windows(split: Split, seed: int | None) -> Windows:
        refs = corpus.sequences(split)
        laws = _laws(order.out / f"laws-{split}.safetensors", corpus, refs, maker, teller)
        return Windows(corpus, refs, trainee.layers, shape, seed, laws)

    held = windows("held", None) if corpus.sequences("held") else None
    return _Bench(trainee, windows("train", order.seed), held, corpus)


def _laws(
    path: Path, corpus: Corpus, refs: list[SequenceRef], maker: LawMaker, teller: Teller
) -> LawTable:
    """Of all rows of `refs`, read back where they have been made before."""
    rows = sum(ref.length - 1 for ref in refs)
    if path.is_file():
        table = load_laws(path)
        if len(table.columns) == rows:
            return table
    place = corpus.layers.index(int(corpus.plan["num_layers"]))
    teller.begin("laws of the target", rows, 0)

    def told(ref: SequenceRef) -> torch.Tensor:
        states = corpus.states(ref)[:, place]
        teller.advance(len(states), "")
        return states

    table = maker.of_all(told(ref) for ref in refs)
    table.save(path)
    return table


def _settle(order: TrainOrder, bench: _Bench) -> LoopOptions:
    """The options of the run in the folder; a new run's are written down first."""
    path = order.folder / "plan.json"
    wanted = {
        "corpus": bench.corpus.plan.get("digest"),
        "rows": bench.windows.num_rows,
        "target": order.target,
        "proposer": order.proposer,
        "seed": order.seed,
        "window": order.window,
        "windows": order.windows,
        "half": order.half,
        "unroll": json.loads(json.dumps(asdict(order.unroll))),
        "accumulate": order.loop.accumulate,
        "rate": order.loop.rate,
        "others_rate": order.loop.others_rate,
        "start_from": None if order.start_from is None else str(order.start_from),
    }
    if path.is_file():
        there: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for name, value in wanted.items():
            if there.get(name) != value:
                raise InvalidArgument(
                    f"{path} has {name} {there.get(name)!r}, expected {value!r}: go on with the"
                    " settings it was begun with, or name another folder",
                    field=name,
                )
        return _with_steps(order, int(there["steps"]))
    steps = order.steps or _steps_in(order, bench)
    order.folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, json_bytes({**wanted, "steps": steps}))
    return _with_steps(order, steps)


def _with_steps(order: TrainOrder, steps: int) -> LoopOptions:
    options = asdict(order.loop) | {"steps": steps}
    options["warmup"] = max(1, min(order.loop.warmup, steps // 10))
    return LoopOptions(**options)


def _steps_in(order: TrainOrder, bench: _Bench) -> int:
    """How many steps fit into the minutes, by the time of a few that change no weight."""
    trainee = bench.trainee
    optimizer = Optimizer(trainee.parameter_groups(), 0.0, 0.0, 0.0)

    def once() -> float:
        started = time.monotonic()
        for _ in range(order.loop.accumulate):
            trainee.loss(bench.windows.batch(0), 1.0).total.backward()
        optimizer.step(0.0, 1.0)
        return time.monotonic() - started

    once()
    took = min(once() for _ in range(_TIMED_STEPS))
    return max(1, int(order.minutes * 60 * _TIME_FOR_STEPS / took))


def _line(figures: dict[str, float], names: tuple[str, ...] = ()) -> str:
    shown = names or tuple(figures)
    return ", ".join(f"{name} {figures[name]:.3f}" for name in shown if name in figures)
