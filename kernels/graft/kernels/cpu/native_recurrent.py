"""A recurrent draft network and its trees as single calls into the native library.

Between two calls the weights of a whole target pass through the cache, and what Python needs for a
call is gone from it, too: so a call is prepared by few and plain operations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CDLL, c_float, c_int32, c_void_p

import numpy as np
import torch
from torch import Tensor

from graft.common.tree import FloatArray, IntArray
from graft.kernels.cpu.library import CChildLaw, CDecoderLayer, CRecurrentNet, CStem, Workers
from graft.kernels.cpu.native_stack import address_of, c_layer
from graft.kernels.cpu.native_views import CViews, floats, ints
from graft.kernels.ops import Bush, BushStem, KvCache, RecurrentSpec, StepRows


class NativeRecurrent:
    """The network in its C form; holds the tensors it points to."""

    def __init__(self, library: CDLL, workers: Workers, spec: RecurrentSpec) -> None:
        self._forward = library.graft_recurrent_forward
        self._grow = library.graft_recurrent_grow
        self._workers = workers
        self._spec = spec
        self._hidden = spec.embedding.shape[1]
        self._width = self._hidden if spec.fc is None else spec.fc.in_features
        self._layers = (CDecoderLayer * len(spec.layers))(*map(c_layer, spec.layers))
        self._token_ids = None if spec.token_ids is None else spec.token_ids.int().contiguous()
        self._state_norms = torch.cat(spec.state_norms) if spec.state_norms else None
        self._net = CRecurrentNet(
            None if spec.fc is None else address_of(spec.fc),
            None if spec.input_norm is None else floats(spec.input_norm),
            None if self._state_norms is None else floats(self._state_norms),
            len(spec.state_norms),
            self._width,
            floats(spec.embedding),
            floats(spec.embedding_norm),
            floats(spec.hidden_norm),
            ctypes.addressof(self._layers),
            floats(spec.final_norm),
            address_of(spec.head),
            None if self._token_ids is None else ints(self._token_ids),
            len(spec.layers),
            self._hidden,
            spec.embedding.shape[0],
            spec.norm_before_residual,
            spec.norm_output,
        )
        self._address = ctypes.addressof(self._net)
        self._views = CViews()
        self._checked: KvCache | None = None

    def forward(self, tokens: Tensor, hidden: Tensor, rows: StepRows, kv: KvCache) -> Tensor:
        """tokens: [rows] int32; hidden: [rows, hidden] -> [rows, hidden]."""
        num_rows = rows.positions.shape[0]
        if tokens.shape != (num_rows,) or hidden.shape != (num_rows, self._hidden):
            raise ValueError(
                f"tokens are {tuple(tokens.shape)} and hidden {tuple(hidden.shape)}, "
                f"expected ({num_rows},) and ({num_rows}, {self._hidden})"
            )
        out = torch.empty(hidden.shape)
        self._forward(
            self._workers.address,
            self._address,
            self._cache(kv),
            self._views.step(rows),
            ints(tokens),
            floats(hidden),
            out.data_ptr(),
        )
        return out

    def grow(
        self, stems: Sequence[BushStem], roots: Sequence[Tensor | None], kv: KvCache, fused: bool
    ) -> list[Bush]:
        """The rows and the tree of each stem, all in one call."""
        width = self._hidden if fused else self._width
        for stem, root in zip(stems, roots, strict=True):
            self._check(stem, root, kv.page_tokens, width)
        call = _Call(stems, roots, self._hidden)
        lawful = self._grow(
            self._workers.address,
            self._address,
            self._cache(kv),
            ctypes.addressof(call.structs),
            len(stems),
            fused,
            call.states,
            call.states + 4 * self._hidden * len(stems),
        )
        if not lawful:
            raise ValueError("a row of logits holds NaN or +inf, or its filters leave nothing")
        return call.bushes()

    def _cache(self, kv: KvCache) -> int:
        if self._checked is not kv:
            layer = self._spec.layers[0]
            num_layers, _, kv_heads, head_dim = kv.keys.shape
            width = (layer.num_heads + 2 * kv_heads) * head_dim
            expected = (len(self._spec.layers), layer.head_dim, layer.qkv.out_features)
            if (num_layers, head_dim, width) != expected:
                raise ValueError(
                    f"the cache has {num_layers} layers of {kv_heads} heads of {head_dim}, "
                    f"expected {expected[0]} of heads of {expected[1]} that fit "
                    f"{expected[2]} outputs of q, k and v"
                )
            self._checked = kv
        return self._views.layer(kv, 0)

    def _check(self, stem: BushStem, root: Tensor | None, page_tokens: int, width: int) -> None:
        vocab, topk, rows = self._spec.head.out_features, stem.topk, len(stem.tokens)
        num_run, children = topk * (stem.num_steps - 1), stem.num_children
        if not (
            1 <= topk <= children <= vocab
            and stem.num_steps >= 1
            and 2 <= stem.num_nodes <= 1 + children + num_run * children
            and rows <= stem.cached <= len(stem.pages) * page_tokens - num_run
        ):
            raise ValueError(
                f"a tree of {stem.num_steps} steps, topk {topk}, {children} children and "
                f"{stem.num_nodes} nodes behind {stem.cached} slots, {rows} of them to be run, "
                f"does not fit {vocab} tokens and "
                f"{len(stem.pages)} pages of {page_tokens}"
            )
        if stem.features.shape != (rows, width) or (root is None) != (rows > 0):
            raise ValueError(
                f"features are {stem.features.shape} and the root is {type(root).__name__}, "
                f"expected ({rows}, {width}) and a root only where no row is to be run"
            )
        if root is not None and root.shape != (self._hidden,):
            raise ValueError(f"a root is {tuple(root.shape)}, expected ({self._hidden},)")
        if stem.noise is not None:
            shapes = {tuple(noise.shape) for noise in stem.noise}
            if len(stem.noise) != stem.num_steps or shapes != {(vocab,)}:
                raise ValueError(
                    f"noise is {len(stem.noise)} times {shapes}, "
                    f"expected {stem.num_steps} times ({vocab},)"
                )


class _Call:
    """The stems of one call in their C form, and where what they grow goes, one after the other."""

    def __init__(
        self, stems: Sequence[BushStem], roots: Sequence[Tensor | None], hidden: int
    ) -> None:
        self._nodes = [stem.num_nodes - 1 for stem in stems]
        self._runs = [stem.topk * (stem.num_steps - 1) for stem in stems]
        drafted, run = sum(self._nodes), sum(self._runs)
        self._numbers = (c_int32 * (2 * (drafted + run)))()
        self._scores = (c_float * drafted)()
        self._states = torch.empty((len(stems) + run, hidden))
        self.states: int = self._states.data_ptr()
        for place, root in enumerate(roots):
            if root is not None:
                self._states[place] = root
        self._held: list[object] = []
        number, score = ctypes.addressof(self._numbers), ctypes.addressof(self._scores)
        structs = []
        for stem, nodes, runs in zip(stems, self._nodes, self._runs, strict=True):
            structs.append(
                CStem(
                    stem.topk,
                    stem.num_children,
                    stem.num_steps,
                    stem.num_nodes,
                    stem.position,
                    stem.cached,
                    self._array((c_int32 * len(stem.pages))(*stem.pages)),
                    len(stem.pages),
                    len(stem.tokens),
                    self._values(stem.tokens, np.int32),
                    self._values(stem.features, np.float32),
                    CChildLaw(None, stem.temperature, stem.top_k, stem.top_p, stem.min_p),
                    None if stem.noise is None else self._array(_pointers(stem.noise)),
                    number,
                    number + 4 * nodes,
                    score,
                    number + 8 * nodes,
                    number + 8 * nodes + 4 * runs,
                )
            )
            number += 8 * (nodes + runs)
            score += 4 * nodes
        self.structs = (CStem * len(stems))(*structs)

    def _array(self, array: ctypes.Array[c_int32] | ctypes.Array[c_void_p]) -> int:
        self._held.append(array)
        return ctypes.addressof(array)

    def _values(self, values: IntArray | FloatArray, dtype: type) -> int:
        plain: IntArray | FloatArray = np.ascontiguousarray(values, dtype)
        self._held.append(plain)
        return int(plain.__array_interface__["data"][0])

    def bushes(self) -> list[Bush]:
        """What the call has written."""
        numbers, scores = self._numbers[:], self._scores[:]
        made = []
        at = score = 0
        row = len(self._nodes)
        for place, (nodes, runs) in enumerate(zip(self._nodes, self._runs, strict=True)):
            ran, end = at + 2 * nodes, at + 2 * (nodes + runs)
            made.append(
                Bush(
                    tokens=numbers[at : at + nodes],
                    parents=numbers[at + nodes : ran],
                    scores=scores[score : score + nodes],
                    root=self._states[place],
                    run_tokens=numbers[ran : ran + runs],
                    run_parents=numbers[ran + runs : end],
                    states=self._states[row : row + runs],
                )
            )
            at, score, row = end, score + nodes, row + runs
        return made


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(tensors))(*map(floats, tensors))
