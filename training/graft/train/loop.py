"""The training loop: steps, checkpoints that resume exactly, figures to a log. Knows no network.

Step n reads batches that are a function of n, and nothing else is random, so a run that was
stopped and resumed ends with the bytes of one that was not.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graft.common.errors import InvalidArgument
from graft.train.optimizer import Optimizer
from graft.train.trainee import Trainee
from graft.train.windows import Windows

_RESUME, _METRICS = "resume.pt", "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How long and how fast.

    steps: of the optimizer. accumulate: batches of a step. rate: at its height, of matrices;
    others_rate: times that, of all else. warmup: steps until the height. keep_every,
    look_every: steps between checkpoints, and between looks at held-out text. export_every_s:
    seconds between drafters written for others to try, 0 writes only the last.
    """

    steps: int
    accumulate: int = 1
    rate: float = 2e-3
    others_rate: float = 0.5
    weight_decay: float = 0.0
    warmup: int = 20
    clip: float = 1.0
    keep_every: int = 100
    look_every: int = 100
    export_every_s: float = 900.0


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is. figures: of this step, or of held-out text where `held`."""

    step: int
    steps: int
    figures: dict[str, float]
    held: bool


def train(
    trainee: Trainee,
    windows: Windows,
    held: Windows | None,
    folder: Path,
    options: LoopOptions,
    report: Callable[[Progress], None],
) -> dict[str, float]:
    """Trains to the last step and saves the drafter to `folder`; goes on where a run stopped.

    In place: the trainee's weights. Figures go to metrics.jsonl in `folder`.

    returns: the figures of held-out text at the end, empty without any.

    Raises:
        InvalidArgument: the checkpoint in `folder` is of a run with other options.
    """
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = Optimizer(
        trainee.parameter_groups(), options.rate, options.others_rate, options.weight_decay
    )
    first = _resume(trainee, optimizer, folder, options)
    _cut_metrics(folder / _METRICS, first)
    started = exported = time.monotonic()
    with (folder / _METRICS).open("a", encoding="utf-8") as log:

        def note(progress: Progress) -> None:
            line = {"step": progress.step, "held": progress.held, **progress.figures}
            log.write(json.dumps(line) + "\n")
            log.flush()
            report(progress)

        for step in range(first, options.steps):
            figures = _step(trainee, windows, optimizer, step, options)
            rows = (step + 1 - first) * options.accumulate
            rows *= windows.shape.count * windows.shape.length
            figures["rows_per_s"] = rows / (time.monotonic() - started)
            done = step + 1
            note(Progress(done, options.steps, figures, held=False))
            if done < options.steps and done % options.keep_every == 0:
                _keep(trainee, optimizer, folder, done, options)
            if held is not None and done < options.steps and done % options.look_every == 0:
                note(Progress(done, options.steps, evaluate(trainee, held), held=True))
            now = time.monotonic()
            if options.export_every_s and now - exported > options.export_every_s:
                trainee.save(folder)
                exported = now
        _keep(trainee, optimizer, folder, options.steps, options)
        trainee.save(folder)
        if held is None:
            return {}
        final = evaluate(trainee, held)
        if first < options.steps:
            note(Progress(options.steps, options.steps, final, held=True))
    return final


def evaluate(trainee: Trainee, held: Windows) -> dict[str, float]:
    """Means of the trainee's figures over one epoch of held-out windows."""
    sums: dict[str, list[float]] = {}
    for batch in held.once():
        for name, (total, count) in trainee.figures(batch).items():
            entry = sums.setdefault(name, [0.0, 0.0])
            entry[0] += total
            entry[1] += count
    return {name: total / max(count, 1.0) for name, (total, count) in sums.items()}


def share_of_rate(step: int, steps: int, warmup: int) -> float:
    """Linear up to 1 at `warmup`, then a cosine down to 0 at `steps`."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _step(
    trainee: Trainee, windows: Windows, optimizer: Optimizer, step: int, options: LoopOptions
) -> dict[str, float]:
    figures: dict[str, float] = {}
    for turn in range(options.accumulate):
        batch = windows.batch(step * options.accumulate + turn)
        loss = trainee.loss(batch, step / options.steps)
        (loss.total / options.accumulate).backward()
        part = {"loss": float(loss.total.detach()), **loss.figures}
        for name, value in part.items():
            figures[name] = figures.get(name, 0.0) + value / options.accumulate
    share = share_of_rate(step, options.steps, options.warmup)
    figures["gradient"] = optimizer.step(share, options.clip)
    return figures


def _keep(
    trainee: Trainee, optimizer: Optimizer, folder: Path, step: int, options: LoopOptions
) -> None:
    stored = {
        "step": step,
        "options": _fixed(options),
        "weights": trainee.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    partial = folder / (_RESUME + ".tmp")
    torch.save(stored, partial)
    partial.replace(folder / _RESUME)


def _resume(trainee: Trainee, optimizer: Optimizer, folder: Path, options: LoopOptions) -> int:
    """Steps done; the weights and the optimizer as they were then."""
    path = folder / _RESUME
    if not path.is_file():
        return 0
    stored: dict[str, Any] = torch.load(path, weights_only=True)
    if stored["options"] != _fixed(options):
        raise InvalidArgument(
            f"{path} is of a run with {stored['options']}, asked for is {_fixed(options)}:"
            " give the same options or another folder",
            field="out",
        )
    trainee.load_state_dict(stored["weights"])
    optimizer.load_state_dict(stored["optimizer"])
    return int(stored["step"])


def _fixed(options: LoopOptions) -> dict[str, float]:
    """Options that decide the result."""
    return {
        "steps": options.steps,
        "accumulate": options.accumulate,
        "rate": options.rate,
        "others_rate": options.others_rate,
        "weight_decay": options.weight_decay,
        "warmup": options.warmup,
        "clip": options.clip,
    }


def _cut_metrics(path: Path, step: int) -> None:
    """Drops lines behind `step`: those steps are done again."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            break
    partial = path.with_name(path.name + ".tmp")
    partial.write_text("".join(kept), encoding="utf-8")
    partial.replace(path)
