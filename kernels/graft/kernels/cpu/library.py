"""Finds and opens the native library that fits this processor. Knows its C functions' types."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import CDLL, Structure, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "native"
ABI = 1  # graft_abi of machine.cpp
INSTRUCTION_SETS = ("avx512", "avx2", "portable")  # best first


class CLinear(Structure):
    """PackedLinear of linear.h."""

    _fields_ = (
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("kind", c_int64),
    )


class CKvLayer(Structure):
    """KvLayer of kv.h."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("page_tokens", c_int64),
    )


class CStepRows(Structure):
    """StepRows of kv.h."""

    _fields_ = (
        ("rows", c_int64),
        ("max_pages", c_int64),
        ("positions", c_void_p),
        ("write_slots", c_void_p),
        ("sequence", c_void_p),
        ("page_table", c_void_p),
        ("prefix_len", c_void_p),
        ("extra_ptr", c_void_p),
        ("extra_slots", c_void_p),
    )


class CDecoderLayer(Structure):
    """DecoderLayer of layer.cpp."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("qkv", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("output", c_void_p),
        ("mlp_norm", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("half", c_int64),
        ("heads", c_int64),
        ("window", c_int64),
        ("eps", c_float),
        ("scale", c_float),
    )


class CRecurrentNet(Structure):
    """RecurrentNet of recurrent.cpp."""

    _fields_ = (
        ("fc", c_void_p),
        ("input_norm", c_void_p),
        ("state_norms", c_void_p),
        ("num_states", c_int64),
        ("width", c_int64),
        ("embedding", c_void_p),
        ("embedding_norm", c_void_p),
        ("hidden_norm", c_void_p),
        ("layers", c_void_p),
        ("final_norm", c_void_p),
        ("head", c_void_p),
        ("token_ids", c_void_p),
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("vocab", c_int64),
        ("norm_before_residual", c_int64),
        ("norm_output", c_int64),
    )


class CChildLaw(Structure):
    """ChildLaw of children.h."""

    _fields_ = (
        ("noise", c_void_p),
        ("temperature", c_float),
        ("top_k", c_int),
        ("top_p", c_float),
        ("min_p", c_float),
    )


class CStem(Structure):
    """Stem of bush.h."""

    _fields_ = (
        ("topk", c_int64),
        ("children", c_int64),
        ("num_steps", c_int64),
        ("num_nodes", c_int64),
        ("position", c_int64),
        ("cached", c_int64),
        ("pages", c_void_p),
        ("num_pages", c_int64),
        ("rows", c_int64),
        ("tokens_before", c_void_p),
        ("features", c_void_p),
        ("law", CChildLaw),
        ("noise", c_void_p),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("scores", c_void_p),
        ("run_tokens", c_void_p),
        ("run_parents", c_void_p),
    )


_P, _I, _F = c_void_p, c_int64, c_float
_SIGNATURES: dict[str, tuple[object, Sequence[object]]] = {
    "graft_pool_create": (_P, (c_int,)),
    "graft_pool_destroy": (None, (_P,)),
    "graft_alloc": (_P, (_I,)),
    "graft_free": (None, (_P,)),
    "graft_linear_pack": (None, (_P, _P, _I, _I, _P, _I)),
    "graft_quant_pack": (None, (_P, _P, _I, _I, _I, _P, _I)),
    "graft_linear": (None, (_P, _P, _P, _I, _P)),
    "graft_linear_rows": (None, (_P, _P, _I, _P)),
    "graft_rms_norm": (None, (_P, _P, _P, _F, _I, _I, _P)),
    "graft_add": (None, (_P, _P, _P, _I)),
    "graft_rope": (None, (_P, _P, _I, _I, _I, _I, _P, _P, _P, _I)),
    "graft_silu_mul": (None, (_P, _P, _I, _I, _P)),
    "graft_embed": (None, (_P, _I, _P, _I, _P)),
    "graft_write_kv": (None, (_P, _P, _P, _P, _I, _I)),
    "graft_attend": (
        None,
        (_P, _P, _P, _P, _I, _I, _F, _I, _P),
    ),
    "graft_layers": (None, (_P, _P, _P, _I, _P, _P)),
    "graft_recurrent_forward": (None, (_P, _P, _P, _P, _P, _P, _P)),
    "graft_recurrent_grow": (c_int, (_P, _P, _P, _P, _I, _I, _P, _P)),
    "graft_choose": (None, (_P, _P, _P)),
    "graft_head_choose": (None, (_P, _P, _P, _P, _P)),
    "graft_target_probs": (None, (_P, _P, _P)),
    "graft_noise": (None, (_I, _I, _I, _P)),
    "graft_accept": (None, (_I, _P, _P, _P, _P, _P, _I, _P, _P)),
    "graft_keep": (None, (_P, _P, _I, _I, _I, _P, _P, _I)),
}


def available(folder: Path = FOLDER) -> tuple[str, ...]:
    """Instruction sets that are built in `folder` and that this processor runs, best first."""
    portable = _open(folder, "portable")
    if portable is None:
        return ()
    supports = portable.graft_supports
    supports.argtypes, supports.restype = (ctypes.c_char_p,), c_int
    return tuple(
        isa for isa in INSTRUCTION_SETS if supports(isa.encode()) and _open(folder, isa) is not None
    )


def load(isa: str | None = None, folder: Path = FOLDER) -> tuple[str, CDLL] | None:
    """The best library of this processor, or the one for `isa`, with its name; None without one.

    Calls into it release the interpreter lock.
    """
    names = available(folder)
    name = isa if isa is not None else next(iter(names), None)
    if name is None or name not in names:
        return None
    library = _open(folder, name)
    assert library is not None
    return name, library


class Workers:
    """Threads of a library, stopped when the last holder is gone."""

    def __init__(self, library: CDLL, threads: int) -> None:
        self.address: int = library.graft_pool_create(threads)
        weakref.finalize(self, library.graft_pool_destroy, self.address)


@cache
def _open(folder: Path, isa: str) -> CDLL | None:
    path = folder / f"libgraft_cpu_{isa}.so"
    if not path.exists():
        return None
    try:
        library = CDLL(str(path))
        if library.graft_abi() != ABI:
            return None
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):  # for another machine, or from older sources
        return None
    return library
