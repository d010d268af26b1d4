"""Shares memory out before it is used, and says which number to lower when it does not fit.

Knows sizes; allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from graft.common.errors import InvalidArgument

_FLOAT = 4
_CONTEXTS = 4
_LEAST_PAGES = 2
_RESERVE = 0.1
_FEATURE_PART = 16
_NODE_BYTES = 6 * _FLOAT
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What the target's shape costs. widest: the widest activation of a row, in values."""

    weight_bytes: int
    kv_bytes_per_token: int
    vocab_size: int
    hidden_size: int
    widest: int
    context_length: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What the settings ask for. kv_tokens of 0 leaves the choice to the plan.

    feature_bytes: room for hidden states that are kept for drafters, at most; they never get more
        than a sixteenth of the budget, for they save time and are not needed.
    """

    kv_tokens: int
    page_tokens: int
    max_step_rows: int
    max_nodes: int
    max_trees: int
    max_running: int
    feature_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The shares, in bytes; kv_tokens is a multiple of the page."""

    kv_tokens: int
    weight_bytes: int
    kv_bytes: int
    step_bytes: int
    tree_bytes: int
    budget_bytes: int
    feature_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All shares together."""
        shares = (self.weight_bytes, self.kv_bytes, self.step_bytes, self.tree_bytes)
        return sum(shares) + self.feature_bytes

    def lines(self) -> list[dict[str, str]]:
        """The shares as the lines of a table, for the log at start."""
        shares = [
            ("weights", self.weight_bytes),
            (f"KV of {self.kv_tokens} tokens", self.kv_bytes),
            ("step buffers", self.step_bytes),
            ("candidate trees", self.tree_bytes),
            ("drafters' features", self.feature_bytes),
            ("total", self.total_bytes),
            ("budget", self.budget_bytes),
        ]
        return [{"share": name, "size": _shown(size)} for name, size in shares]


def available_bytes(memory_gb: float) -> int:
    """The budget: what was asked for, or what machine and container leave, less a reserve."""
    if memory_gb:
        return int(memory_gb * (1 << 30))
    left = psutil.virtual_memory().available
    if _CGROUP_LIMIT.is_file() and (limit := _CGROUP_LIMIT.read_text().strip()).isdigit():
        left = min(left, int(limit) - int(_CGROUP_USED.read_text()))
    return int(left * (1 - _RESERVE))


def plan_memory(sizes: ModelSizes, demand: Demand, budget_bytes: int) -> MemoryPlan:
    """Shares the budget out.

    Without a wish the KV gets four contexts, or what fits.

    Raises:
        InvalidArgument: it does not fit; the sentence names the first number of this order whose
            lowering alone mends it: kv_tokens, max_step_rows, max_nodes, max_running.
    """
    least = demand.page_tokens * _LEAST_PAGES
    if demand.kv_tokens:
        kv_tokens = _pages(max(demand.kv_tokens, least), demand.page_tokens)
        plan = _plan(sizes, demand, kv_tokens, budget_bytes)
    else:
        wish = _pages(
            sizes.context_length * _CONTEXTS + demand.max_running * demand.max_nodes,
            demand.page_tokens,
        )
        fixed = _plan(sizes, demand, 0, budget_bytes).total_bytes
        fits = (budget_bytes - fixed) // (sizes.kv_bytes_per_token * demand.page_tokens)
        kv_tokens = max(least, min(wish, fits * demand.page_tokens))
        plan = _plan(sizes, demand, kv_tokens, budget_bytes)
    if plan.total_bytes <= budget_bytes:
        return plan
    raise InvalidArgument(_advice(sizes, demand, plan, least), field="memory")


def _plan(sizes: ModelSizes, demand: Demand, kv_tokens: int, budget_bytes: int) -> MemoryPlan:
    rows = demand.max_step_rows
    # Residual, normed input, q|k|v, attention, gate|up and its product live at the same time;
    # logits are held once as they are and once for what is filtered or scored.
    activations = rows * (4 * sizes.hidden_size + 2 * sizes.widest)
    logits = 2 * rows * sizes.vocab_size
    # Ancestor lists: depth + 1 slots a node at worst.
    paths = rows * min(demand.max_nodes, rows)
    return MemoryPlan(
        kv_tokens=kv_tokens,
        weight_bytes=sizes.weight_bytes,
        kv_bytes=kv_tokens * sizes.kv_bytes_per_token,
        step_bytes=_FLOAT * (activations + logits + paths),
        tree_bytes=demand.max_running * demand.max_trees * demand.max_nodes * _NODE_BYTES,
        budget_bytes=budget_bytes,
        feature_bytes=min(demand.feature_bytes, budget_bytes // _FEATURE_PART),
    )


def _advice(sizes: ModelSizes, demand: Demand, plan: MemoryPlan, least: int) -> str:
    """Which single number to lower, in the order users of such servers are told."""
    budget = plan.budget_bytes
    short = f"{_shown(plan.total_bytes)} needed, {_shown(budget)} there"

    def fits(kv_tokens: int, asked: Demand) -> bool:
        return _plan(sizes, asked, kv_tokens, budget).total_bytes <= budget

    page = demand.page_tokens
    if demand.kv_tokens:
        most = _greatest(least // page, plan.kv_tokens // page, lambda n: fits(n * page, demand))
        if most is not None:
            return f"{short}: lower kv_tokens from {demand.kv_tokens} to {most * page} or less"
    steps: list[tuple[str, int, int, Callable[[int], Demand]]] = [
        (
            "max_step_rows",
            demand.max_step_rows,
            demand.max_running + 1,
            lambda n: replace(demand, max_step_rows=n),
        ),
        ("max_nodes", demand.max_nodes, 1, lambda n: replace(demand, max_nodes=n)),
        ("max_running", demand.max_running, 1, lambda n: replace(demand, max_running=n)),
    ]
    for name, value, low, changed in steps:
        most = _greatest(
            low,
            value,
            lambda n, changed=changed: fits(  # type: ignore[misc]
                page * _LEAST_PAGES, changed(n)
            ),
        )
        if most is not None:
            return f"{short}: lower {name} from {value} to {most} or less"
    weights = _shown(sizes.weight_bytes)
    return f"{short}, and the weights alone take {weights}: choose a smaller model or more memory"


def _greatest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The greatest number in low..high that fits, by bisection; None when low does not."""
    if low > high or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _pages(tokens: int, page_tokens: int) -> int:
    return -(-tokens // page_tokens) * page_tokens


def _shown(num_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"
