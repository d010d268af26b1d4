"""A recurrent draft network and its trees as single calls into the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CDLL

import torch
from torch import Tensor

from graft.kernels.cpu.library import CChildLaw, CDecoderLayer, CRecurrentNet, CStem, Workers
from graft.kernels.cpu.native_stack import address_of, c_layer
from graft.kernels.cpu.native_views import CViews, floats, ints
from graft.kernels.ops import Bush, BushStem, KvCache, RecurrentSpec, StepRows


class NativeRecurrent:
    """The network in its C form; holds the tensors it points to."""

    def __init__(self, library: CDLL, workers: Workers, spec: RecurrentSpec) -> None:
        self._c = library
        self._workers = workers
        self._spec = spec
        self._hidden = spec.embedding.shape[1]
        self._layers = (CDecoderLayer * len(spec.layers))(*map(c_layer, spec.layers))
        self._token_ids = None if spec.token_ids is None else spec.token_ids.int().contiguous()
        self._net = CRecurrentNet(
            floats(spec.embedding),
            floats(spec.embedding_norm),
            floats(spec.hidden_norm),
            ctypes.addressof(self._layers),
            floats(spec.final_norm),
            address_of(spec.head),
            None if self._token_ids is None else ints(self._token_ids),
            len(spec.layers),
            self._hidden,
            spec.norm_before_residual,
            spec.norm_output,
        )
        self._address = ctypes.addressof(self._net)
        self._views = CViews()

    def forward(self, tokens: Tensor, hidden: Tensor, rows: StepRows, kv: KvCache) -> Tensor:
        """tokens: [rows] int32; hidden: [rows, hidden] -> [rows, hidden]."""
        num_rows = rows.positions.shape[0]
        if tokens.shape != (num_rows,) or hidden.shape != (num_rows, self._hidden):
            raise ValueError(
                f"tokens are {tuple(tokens.shape)} and hidden {tuple(hidden.shape)}, "
                f"expected ({num_rows},) and ({num_rows}, {self._hidden})"
            )
        self._check_cache(kv)
        out = torch.empty(hidden.shape)
        self._c.graft_recurrent_forward(
            self._workers.address,
            self._address,
            self._views.layer(kv, 0),
            self._views.step(rows),
            ints(tokens),
            floats(hidden),
            out.data_ptr(),
        )
        return out

    def grow(
        self, roots: Tensor, stems: Sequence[BushStem], page_table: Tensor, kv: KvCache
    ) -> list[Bush]:
        """A tree for each stem, all levels in one call."""
        count = len(stems)
        if roots.shape != (count, self._hidden) or page_table.shape[0] != count:
            raise ValueError(
                f"roots are {tuple(roots.shape)} and page_table {tuple(page_table.shape)}, "
                f"expected ({count}, {self._hidden}) and ({count}, max_pages)"
            )
        self._check_cache(kv)
        for stem in stems:
            self._check_stem(stem, page_table.shape[1] * kv.page_tokens)
        room = _Room(stems, self._hidden)
        structs = (CStem * count)(*room.structs)
        lawful = self._c.graft_recurrent_grow(
            self._workers.address,
            self._address,
            self._views.layer(kv, 0),
            ctypes.addressof(structs),
            count,
            ints(page_table),
            page_table.shape[1],
            floats(roots),
            room.states.data_ptr(),
        )
        if not lawful:
            raise ValueError("a row of logits holds NaN or +inf, or its filters leave nothing")
        return room.bushes()

    def _check_cache(self, kv: KvCache) -> None:
        layer = self._spec.layers[0]
        kv_heads, head_dim = kv.keys.shape[2:]
        width = (layer.num_heads + 2 * kv_heads) * head_dim
        if (
            kv.keys.shape[0] != len(self._spec.layers)
            or head_dim != layer.head_dim
            or width != layer.qkv.out_features
        ):
            raise ValueError(
                f"the cache has {kv.keys.shape[0]} layers of {kv_heads} heads of {head_dim}, "
                f"expected {len(self._spec.layers)} of heads of {layer.head_dim} that fit "
                f"{layer.qkv.out_features} outputs of q, k and v"
            )

    def _check_stem(self, stem: BushStem, num_slots: int) -> None:
        vocab = self._spec.head.out_features
        candidates = stem.topk + (stem.num_steps - 1) * stem.topk**2
        if not (
            1 <= stem.topk <= vocab
            and stem.num_steps >= 1
            and 2 <= stem.num_nodes <= candidates + 1
            and stem.cached + stem.topk * (stem.num_steps - 1) <= num_slots
        ):
            raise ValueError(
                f"a tree of {stem.num_steps} steps, topk {stem.topk} and {stem.num_nodes} nodes "
                f"behind {stem.cached} slots does not fit {vocab} tokens and {num_slots} slots"
            )
        shapes = {tuple(noise.shape) for noise in stem.noise or ()}
        if stem.noise is not None and (len(stem.noise) != stem.num_steps or shapes != {(vocab,)}):
            raise ValueError(
                f"noise is {len(stem.noise)} times {shapes}, expected {stem.num_steps} ({vocab},)"
            )


class _Room:
    """Where the trees of one call go, one stem after the other, and the stems in their C form."""

    def __init__(self, stems: Sequence[BushStem], hidden: int) -> None:
        self._nodes = [stem.num_nodes - 1 for stem in stems]
        self._runs = [stem.topk * (stem.num_steps - 1) for stem in stems]
        drafted, run = sum(self._nodes), sum(self._runs)
        self._numbers = torch.empty(2 * (drafted + run), dtype=torch.int32)
        self._scores = torch.empty(drafted)
        self.states = torch.empty((run, hidden))
        self._noise: list[ctypes.Array[ctypes.c_void_p]] = []
        self.structs = []
        number, score = self._numbers.data_ptr(), self._scores.data_ptr()
        for stem, nodes, runs in zip(stems, self._nodes, self._runs, strict=True):
            self.structs.append(
                CStem(
                    stem.topk,
                    stem.num_steps,
                    stem.num_nodes,
                    stem.position,
                    stem.cached,
                    CChildLaw(None, stem.temperature, stem.top_k, stem.top_p, stem.min_p),
                    self._noise_of(stem),
                    number,
                    number + 4 * nodes,
                    score,
                    number + 8 * nodes,
                    number + 8 * nodes + 4 * runs,
                )
            )
            number += 8 * (nodes + runs)
            score += 4 * nodes

    def _noise_of(self, stem: BushStem) -> int | None:
        if stem.noise is None:
            return None
        self._noise.append((ctypes.c_void_p * stem.num_steps)(*map(floats, stem.noise)))
        return ctypes.addressof(self._noise[-1])

    def bushes(self) -> list[Bush]:
        """What the call has written."""
        numbers, scores = self._numbers.tolist(), self._scores.tolist()
        made = []
        at = score = row = 0
        for nodes, runs in zip(self._nodes, self._runs, strict=True):
            ran, end = at + 2 * nodes, at + 2 * (nodes + runs)
            made.append(
                Bush(
                    tokens=numbers[at : at + nodes],
                    parents=numbers[at + nodes : ran],
                    scores=scores[score : score + nodes],
                    run_tokens=numbers[ran : ran + runs],
                    run_parents=numbers[ran + runs : end],
                    states=self.states[row : row + runs],
                )
            )
            at, score, row = end, score + nodes, row + runs
        return made
