"""The ragged arrays of one step, from sessions, trees and page tables. Runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat

import numpy as np
import torch
from torch import Tensor

from graft.common.tree import IntArray, Tree, root_only
from graft.kernels.cpu.history import adjust_rows
from graft.kernels.ops import StepRows
from graft.kernels.rows import Law
from graft.verify.session import Session
from graft.verify.step import Chunk, Recall, Round, Step, Work


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One work of a step that ends in a choice.

    work: its place in the step. rows: its part of the output rows, one a node of law.tree.
    write_slots: [num_nodes], int32, the slot of each node's key.
    """

    work: int
    rows: slice
    law: Law
    write_slots: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """Rows of a chunk whose logits score the prompt: row i of `rows` scores tokens[i]."""

    work: int
    rows: slice
    tokens: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step, flattened.

    tokens: [rows], int32. output_rows: [outputs], int64; rows of choices stand first, in order of
    `choices`, then those that only score the prompt.
    """

    tokens: Tensor
    rows: StepRows
    output_rows: Tensor
    choices: tuple[Choice, ...]
    prompt_rows: tuple[PromptRows, ...]

    @property
    def num_choice_rows(self) -> int:
        """Output rows that a token is chosen from."""
        return self.choices[-1].rows.stop if self.choices else 0


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The rows of one work: what StepRows says of them, without the place in the step."""

    tokens: IntArray
    positions: IntArray
    write_slots: IntArray
    prefix_len: IntArray
    extra_counts: IntArray
    extra_slots: IntArray


def build_batch(step: Step, device: torch.device) -> Batch:
    """The arrays that one forward pass and the choice after it need."""
    parts = [_part(work) for work in step.works]
    counts = [len(part.tokens) for part in parts]
    starts = [0, *accumulate(counts)]

    def flat(name: str) -> Tensor:
        return torch.from_numpy(_joined([getattr(part, name) for part in parts])).to(device)

    extra_counts = _joined([part.extra_counts for part in parts]).tolist()
    extra_ptr = np.array([0, *accumulate(extra_counts)], np.int32)
    sequence = np.array([*chain.from_iterable(map(repeat, range(len(parts)), counts))], np.int32)
    rows = StepRows(
        positions=flat("positions"),
        write_slots=flat("write_slots"),
        sequence=torch.from_numpy(sequence).to(device),
        page_table=_page_table(step).to(device),
        prefix_len=flat("prefix_len"),
        extra_ptr=torch.from_numpy(extra_ptr).to(device),
        extra_slots=flat("extra_slots"),
    )
    output_rows, choices, prompt_rows = _outputs(step, parts, starts)
    return Batch(
        tokens=flat("tokens"),
        rows=rows,
        output_rows=torch.from_numpy(output_rows).to(device),
        choices=choices,
        prompt_rows=prompt_rows,
    )


def _joined(columns: Sequence[IntArray]) -> IntArray:
    """The columns one below the other; one alone is not copied."""
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _part(work: Work) -> _Part:
    session = work.session
    if isinstance(work, Chunk | Recall):
        tokens = session.prefix.tokens[work.start : work.stop].copy()
        if isinstance(work, Recall):
            return _plain_part(tokens, work.start, work.write_slots)
        return _plain_part(tokens, work.start, session.pages().slots(work.start, work.stop))
    if work.num_rows == 1:
        # A root alone sees exactly what a plain row sees.
        start = session.kv_length
        return _plain_part(work.tree.tokens, start, session.pages().slots(start, start + 1))
    return _tree_part(work)


def _plain_part(tokens: IntArray, start: int, write_slots: IntArray) -> _Part:
    positions = np.arange(start, start + len(tokens), dtype=np.int32)
    return _Part(
        tokens=tokens,
        positions=positions,
        write_slots=write_slots,
        prefix_len=positions + np.int32(1),
        extra_counts=np.zeros(len(tokens), np.int32),
        extra_slots=np.zeros(0, np.int32),
    )


def _tree_part(work: Round) -> _Part:
    """Each node sees the committed keys and, by slot, its own path from the root on."""
    session, tree = work.session, work.tree
    start = session.kv_length
    write_slots = session.pages().slots(start, start + tree.num_nodes)
    paths: list[list[int]] = []
    for node, parent in enumerate(tree.parent.tolist()):
        paths.append([node] if parent < 0 else [*paths[parent], node])
    return _Part(
        tokens=tree.tokens,
        positions=tree.positions(session.length),
        write_slots=write_slots,
        prefix_len=np.full(tree.num_nodes, start, np.int32),
        extra_counts=tree.depth + np.int32(1),
        extra_slots=write_slots[[*chain.from_iterable(paths)]],
    )


def _page_table(step: Step) -> Tensor:
    tables = [work.session.pages().pages for work in step.works]
    lines = np.full((len(tables), max(len(pages) for pages in tables)), -1, np.int32)
    for line, pages in zip(lines, tables, strict=True):
        line[: len(pages)] = pages
    return torch.from_numpy(lines)


def _outputs(
    step: Step, parts: list[_Part], starts: list[int]
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], tuple[Choice, ...], tuple[PromptRows, ...]]:
    """Which rows' logits are wanted, and what for."""
    wanted: list[int] = []
    choices: list[Choice] = []
    prompt_rows: list[PromptRows] = []
    for place, (work, part) in enumerate(zip(step.works, parts, strict=True)):
        if isinstance(work, Recall) or (isinstance(work, Chunk) and not work.last):
            continue
        tree = root_only(int(part.tokens[-1])) if isinstance(work, Chunk) else work.tree
        first = len(wanted)
        stop = starts[place + 1]
        wanted.extend(range(stop - tree.num_nodes, stop))
        slots = part.write_slots[-tree.num_nodes :]
        choices.append(Choice(place, slice(first, len(wanted)), _law(work, tree), slots))
    for place, work in enumerate(step.works):
        if isinstance(work, Chunk) and work.session.prompt_logprobs_due:
            first = len(wanted)
            stop = min(work.stop, work.session.prompt_length - 1)
            wanted.extend(range(starts[place], starts[place] + max(0, stop - work.start)))
            tokens = work.session.prefix.tokens[work.start + 1 : stop + 1]
            if len(wanted) > first:
                prompt_rows.append(PromptRows(place, slice(first, len(wanted)), tokens.copy()))
    return np.asarray(wanted, np.int64), tuple(choices), tuple(prompt_rows)


def _law(work: Chunk | Round, tree: Tree) -> Law:
    session = work.session
    sampling = session.request.sampling
    history = session.history()
    adjust = None if history is None else adjust_rows(sampling, history, tree)
    return Law(sampling, tree, session.length, adjust, _bitmask(session, tree))


def _bitmask(session: Session, tree: Tree) -> Tensor | None:
    """What the session's grammar lets follow each node; None without one, or when it has failed."""
    if session.grammar is None:
        return None
    ending = session.ending
    return session.grammar.rows(tree, ending.masked, ending.min_tokens - session.generated)
