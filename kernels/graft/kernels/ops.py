"""The contract of the device: what a decoder and a verify step may ask of it.

One `Ops` object stands for one device and one way to compute. Services hold it and never look
behind it, so a CUDA runtime comes in as one more implementation. Implementations: the native CPU
library (`graft.kernels.cpu`), its torch fallback, and later CUDA (`graft.kernels.gpu`).

Batch invariance: an implementation with `batch_invariant` computes every output row from that
row's own inputs in one fixed order, so a row has the same bits alone, in any batch, in a prefill
chunk or as a tree node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from graft.common.tree import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class KvCache:
    """Paged keys and values of all layers.

    keys, values: [num_layers, num_slots, num_kv_heads, head_dim], float32. A slot is
    page * page_tokens + offset; slot order inside a page is token order.
    """

    keys: Tensor
    values: Tensor
    page_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """Where each row of a step sits and what it sees; all int32, on the device of the ops.

        positions: [rows], absolute position (RoPE).
        write_slots: [rows], physical slot that takes the row's key and value.
        sequence: [rows], the row's line of `page_table`.
        page_table: [sequences, max_pages], physical page of each logical page; -1 past the end.
        prefix_len: [rows], the row sees the sequence's logical keys 0..prefix_len-1. A prefill or
            plain row at position p has prefix_len p + 1, itself included. A tree node has the
            number of committed keys (the root's position).
        extra_ptr: [rows + 1]; extra_slots: [extra_ptr[-1]]: physical slots of the further keys the
            row sees, in order of position, itself last. Empty for prefill and plain rows. The
            root of a tree counts as a tree node.
    Key number j of a row is the one at absolute position j: keys are always visited in position
    order, which is what makes a tree node equal a plain row bit for bit.
    """

    positions: Tensor
    write_slots: Tensor
    sequence: Tensor
    page_table: Tensor
    prefix_len: Tensor
    extra_ptr: Tensor
    extra_slots: Tensor


class Adjust(NamedTuple):
    """Logits to change before anything else, row by row; a row names a token at most once.

    ptr: [rows + 1], int32; tokens: [ptr[-1]], int32; ratio, shift: [ptr[-1]], float32. Logit x of
    a named token becomes (x / ratio if x > 0 else x * ratio) - shift; shift +inf forbids it.
    """

    ptr: Tensor
    tokens: Tensor
    ratio: Tensor
    shift: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceRows:
    """The law of each row of logits; graft.kernels.reference.choose says it step by step.

    temperature, top_p, min_p: [rows], float32; temperature 0 is greedy.
    top_k: [rows], int32; 0 keeps all.
    seed: [rows], int64, the bits of the unsigned seed.
    position: [rows], int32, absolute position of the token being chosen: node position + 1.
    adjust_ptr: [rows + 1], int32, and adjust_tokens int32, adjust_ratio, adjust_shift float32,
        all [adjust_ptr[-1]]: before anything else, logit x of a named token becomes
        (x / ratio if x > 0 else x * ratio) - shift. Empty pointers when None.
    bitmask: [rows, ceil(vocab / 32)], int32, bit set = allowed; None allows all.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor
    adjust_ptr: Tensor | None = None
    adjust_tokens: Tensor | None = None
    adjust_ratio: Tensor | None = None
    adjust_shift: Tensor | None = None
    bitmask: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TreeRows:
    """Ragged trees of a step, flattened; all int32.

    ptr: [trees + 1], first row of each tree.
    tokens, next_token, next_sibling: [rows]; links are local to the tree, -1 is none.
    """

    ptr: Tensor
    tokens: Tensor
    next_token: Tensor
    next_sibling: Tensor


class Linear(Protocol):
    """Weights of one linear layer in the device's own layout."""

    @property
    def in_features(self) -> int:
        """Width of the input."""

    @property
    def out_features(self) -> int:
        """Width of the output."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """cos, sin: [max_positions, rotary_dim / 2], float32; the halves of a head rotate (NeoX)."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerSpec:
    """One decoder layer of the Llama family, its weights packed by the ops that will run it.

    attention_norm, mlp_norm: [hidden]; q_norm, k_norm: [head_dim], both None without head norms.
    qkv: q | k | v; gate_up: gate | up. window: as in `Ops.attend`.
    """

    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    rope: RopeTable
    num_heads: int
    head_dim: int
    eps: float
    window: int


class Stack(Protocol):
    """Decoder layers that run in one call, with the bits of the single ops."""

    def run_(self, hidden: Tensor, layers: range, kv: KvCache, rows: StepRows) -> None:
        """In place: hidden [rows, width] passes through `layers`, keys and values are written."""


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentSpec:
    """A draft network of the EAGLE-3 kind, its weights packed by the ops that will run it.

    fc: the target's states side by side -> hidden; None takes them as they are. input_norm:
        [states], over all states at once; state_norms: one [state] each; at most one of the two.
    embedding: [vocab, hidden]. embedding_norm, hidden_norm: [hidden], the two halves that the first
        layer's attention reads side by side; its own attention_norm is not used.
    final_norm: [hidden], before the head. token_ids: [head outputs], int64, the target's id of each
        column; None is the identity.
    norm_before_residual: the residual is the normed state. norm_output: the normed output is what
        the next step reads.
    """

    fc: Linear | None
    input_norm: Tensor | None
    state_norms: tuple[Tensor, ...]
    embedding: Tensor
    embedding_norm: Tensor
    hidden_norm: Tensor
    layers: tuple[LayerSpec, ...]
    final_norm: Tensor
    head: Linear
    token_ids: Tensor | None
    norm_before_residual: bool
    norm_output: bool


@dataclass(frozen=True, slots=True, eq=False)
class BushStem:
    """Where one draft tree grows, and its shape: children, levels, and nodes with the root.

    The rows before it that were not run yet are run first.

    Candidates are numbered and picked as in graft.kernels.reference.candidates, but a tree of one
    child each is its chain, whatever the scores. A node that passes through the network is numbered
    step * topk + beam, and its key goes that many slots behind what is cached.

    position: of a child of the root. cached: leading slots of its `pages` that all nodes see.
    tokens: [rows], int32, of the rows that end before `position`; features: [rows, states], the
        target's states beside them, or [rows, hidden] of those that have passed `fc`.
    noise: [draft vocab], float32, of each level, for a target whose choice hangs on it: children
        are ranked by logit + temperature * noise within the filters. None ranks by the logit.
    children: candidates of each row that is run; 0 is topk, of which only the best go on.
    """

    topk: int
    num_steps: int
    num_nodes: int
    position: int
    cached: int
    pages: Sequence[int]
    tokens: IntArray
    features: FloatArray
    noise: tuple[Tensor, ...] | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    children: int = 0

    @property
    def num_children(self) -> int:
        """Candidates of each row that is run."""
        return self.children or self.topk


@dataclass(frozen=True, slots=True, eq=False)
class Bush:
    """What grew from a stem.

    tokens, parents, scores: [num_nodes - 1], parents first and the root node 0; scores are logs of
        the probability of the whole path, -inf for what cannot be taken.
    run_tokens, run_parents: [topk * (num_steps - 1)], the nodes that passed through the network;
        parents are beams of the level before. states: [as many, hidden], what it made of them.
    """

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    root: Tensor
    run_tokens: list[int]
    run_parents: list[int]
    states: Tensor


class Recurrent(Protocol):
    """A draft network that runs, and grows whole trees, in one call each."""

    def forward(self, tokens: Tensor, hidden: Tensor, rows: StepRows, kv: KvCache) -> Tensor:
        """Runs rows and writes their keys and values, with the bits of the single ops.

        tokens: [rows] int32; hidden: [rows, hidden] -> [rows, hidden], what the next step takes.
        """

    def grow(
        self, stems: Sequence[BushStem], roots: Sequence[Tensor | None], kv: KvCache, fused: bool
    ) -> list[Bush]:
        """Runs the rows of all stems together, then grows their trees level by level.

        roots: [hidden] each, what the last row before the tree gave, where no row is to be run.
        fused: the features have passed `fc`.

        Raises:
            ValueError: a row of logits holds NaN or +inf, or the filters leave nothing of it.
        """


class Ops(Protocol):
    """What a device computes. Inputs and outputs are contiguous float32 unless said otherwise.

    keeps_blocks: quantised weights take the room of their blocks; else they are unpacked to
    float32 when they are packed.
    """

    name: str
    device: torch.device
    batch_invariant: bool
    keeps_blocks: bool

    def pack(self, weights: list[Tensor], biases: list[Tensor | None]) -> Linear:
        """Lays out [out_i, in] weights, stacked by rows (q|k|v, gate|up), once per load."""

    def pack_q8_0(self, blocks: list[Tensor], biases: list[Tensor | None]) -> Linear:
        """As `pack`, from GGUF Q8_0 blocks kept as stored: [out_i, in / 32 * 34], uint8."""

    def pack_q4_1(self, blocks: list[Tensor], biases: list[Tensor | None]) -> Linear:
        """As `pack`, from GGUF Q4_1 blocks kept as stored: [out_i, in / 32 * 20], uint8."""

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        """x: [rows, in] -> [rows, out]."""

    def embed(self, tokens: Tensor, table: Tensor | Linear) -> Tensor:
        """tokens: [rows] int32, table: [vocab, hidden] -> [rows, hidden].

        A packed head serves as the table of a model with tied embeddings, so it is held once.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [..., width], normalised over the last axis and scaled -> same shape."""

    def add_(self, residual: Tensor, x: Tensor) -> None:
        """In place: residual += x."""

    def rope_(self, x: Tensor, positions: Tensor, table: RopeTable) -> None:
        """In place: rotates x [rows, heads, head_dim]; the first 2 * table width entries rotate."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * width] (gate | up) -> silu(gate) * up, [rows, width]."""

    def write_kv(self, kv: KvCache, layer: int, rows: StepRows, k: Tensor, v: Tensor) -> None:
        """In place on kv: k, v [rows, kv_heads, head_dim] go to rows.write_slots of `layer`."""

    def attend(
        self, q: Tensor, kv: KvCache, layer: int, rows: StepRows, scale: float, window: int
    ) -> Tensor:
        """q: [rows, heads, head_dim] -> [rows, heads, head_dim]; window 0 sees everything.

        With a window w, a row at position p sees keys at positions p - w + 1 .. p.
        """

    def stack(self, layers: Sequence[LayerSpec]) -> Stack | None:
        """The layers as one call; None where this device runs them op by op."""

    def recurrent(self, spec: RecurrentSpec) -> Recurrent | None:
        """The draft network in calls of its own; None where this device runs it op by op."""

    def choose(self, logits: Tensor, rows: ChoiceRows) -> Tensor:
        """logits: [rows, vocab] -> [rows], int32, the target's own token after each row; -1 where
        the row holds NaN or +inf or nothing is allowed. Ties go to the lowest id.

        Rule: design section 6; reference implementation graft.kernels.reference.choose.
        """

    def choose_head(self, hidden: Tensor, head: Linear, rows: ChoiceRows) -> Tensor:
        """hidden: [rows, in] -> [rows], int32: `choose` of `linear(hidden, head)`, bit for bit.

        For callers that want nothing else of the logits, which then need not be written.
        """

    def accept(self, trees: TreeRows, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """chosen: [rows] -> (accept_token_num [trees], accept_index [trees, width]), int32.

        accept_token_num counts drafted tokens, the bonus not included. accept_index holds the
        local nodes of the accepted path from the root on, -1 after its end.
        """

    def keep(self, kv: KvCache, source: Tensor, target: Tensor) -> None:
        """In place on kv: slot source[i] is copied to slot target[i] in all layers, in order.

        source, target: [moves] int32; no source is the target of an earlier move; empty is a
        no-op. graft.kernels.reference.keep.keep_moves makes them from accepted paths.
        """


def select(device: str = "cpu", threads: int = 1, prefer: str = "auto") -> Ops:
    """The implementation for a device.

    prefer: "auto" takes the native library and falls back to torch, saying so once in the log;
    "native" refuses to fall back; "torch" is the fallback itself.

    Raises:
        Unsupported: there is no implementation for the device, or no native library for "native".
    """
    from graft.common.errors import Unsupported

    if device != "cpu":
        raise Unsupported(f"device {device} is not offered by this build, expected cpu")
    from graft.kernels.cpu.select import select_cpu

    return select_cpu(threads, prefer)
