"""Reads the container of a GGUF file: metadata and where each tensor's blocks lie.

Knows no model and no block format; bytes are handed out as stored. Source: the GGUF
specification in the ggml repository (docs/gguf.md), versions 2 and 3, little endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from graft.common.errors import ModelNotFound, Unsupported

GgufValue: TypeAlias = int | float | bool | str | list[int | float | bool | str]

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9

# Type number -> (name, values a block, bytes a block).
BLOCK_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    28: ("F64", 1, 8),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its shape as numpy writes it (rows first), its block type and its bytes."""

    name: str
    shape: tuple[int, ...]
    block_type: int
    offset: int
    num_bytes: int

    @property
    def type_name(self) -> str:
        """The name of the block type, for example Q4_1."""
        return BLOCK_TYPES[self.block_type][0]


class GgufFile:
    """An open GGUF file. The mapping lives as long as an array of `blocks` does."""

    def __init__(self, path: Path) -> None:
        """Reads metadata and the tensor table.

        Raises:
            ModelNotFound: no such file, not a GGUF file, or cut short.
            Unsupported: a version or block type that is not known here.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelNotFound(f"cannot read {path}: {error}") from None
        cursor = _Cursor(self._bytes, path)
        try:
            self.metadata, self.tensors = _read(cursor)
        except (struct.error, UnicodeDecodeError, MemoryError, OverflowError):
            raise ModelNotFound(f"{path} is cut short or damaged in its header") from None
        for tensor in self.tensors.values():
            if tensor.offset + tensor.num_bytes > len(self._bytes):
                raise ModelNotFound(
                    f"{path} is cut short: tensor {tensor.name} ends at byte"
                    f" {tensor.offset + tensor.num_bytes}, the file has {len(self._bytes)}"
                )

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """[rows, bytes of a row], the blocks as stored; a vector has one row."""
        tensor = self.tensors[name]
        whole = np.frombuffer(self._bytes, np.uint8, tensor.num_bytes, tensor.offset)
        rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        return whole.reshape(rows, -1)

    def text(self, key: str, default: str = "") -> str:
        """A metadata value that must be a string."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise ModelNotFound(f"{self.path}: {key} is {value!r}, expected text")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A metadata value that must be a number; required when there is no default."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelNotFound(f"{self.path}: {key} is {value!r}, expected a number")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A metadata value that must be a whole number."""
        return int(self.number(key, default))

    def texts(self, key: str) -> list[str]:
        """A metadata value that must be a list of strings."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
            raise ModelNotFound(f"{self.path}: {key} is missing, expected a list of texts")
        return [str(part) for part in value]


class _Cursor:
    """A reading position in mapped bytes."""

    def __init__(self, content: mmap.mmap, path: Path) -> None:
        self.content = content
        self.path = path
        self.at = 0

    def scalar(self, form: str) -> int | float | bool:
        value: int | float | bool = struct.unpack_from(form, self.content, self.at)[0]
        self.at += struct.calcsize(form)
        return value

    def count(self, form: str = "<Q") -> int:
        return int(self.scalar(form))

    def text(self) -> str:
        return self.taken(self.count()).decode("utf-8")

    def taken(self, size: int) -> bytes:
        if self.at + size > len(self.content):
            raise struct.error("past the end")
        self.at += size
        return self.content[self.at - size : self.at]

    def value(self, kind: int) -> GgufValue:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, size = self.count("<I"), self.count()
            if inner == _STRING:
                return [self.text() for _ in range(size)]
            form = self._form(inner)
            raw = self.taken(size * struct.calcsize(form))
            return list(struct.unpack(f"<{size}{form[1]}", raw))
        return self.scalar(self._form(kind))

    def _form(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ModelNotFound(f"{self.path} is damaged: a value has the unknown type {kind}")
        return _SCALARS[kind]


def _read(cursor: _Cursor) -> tuple[dict[str, GgufValue], dict[str, GgufTensor]]:
    if cursor.taken(4) != _MAGIC:
        raise ModelNotFound(f"{cursor.path} is not a GGUF file: its first bytes are not GGUF")
    version = cursor.count("<I")
    if version not in (2, 3):
        raise Unsupported(f"{cursor.path} is GGUF version {version}, expected 2 or 3")
    num_tensors, num_values = cursor.count(), cursor.count()
    metadata: dict[str, GgufValue] = {}
    for _ in range(num_values):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.count("<I"))
    listed = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelNotFound(f"{cursor.path}: general.alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    return metadata, {
        name: GgufTensor(name, shape, kind, start + offset, num_bytes)
        for name, shape, kind, offset, num_bytes in listed
    }


def _tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int, int]:
    name = cursor.text()
    shape = tuple(reversed([cursor.count() for _ in range(cursor.count("<I"))]))
    kind, offset = cursor.count("<I"), cursor.count()
    if kind not in BLOCK_TYPES:
        raise Unsupported(f"{cursor.path}: tensor {name} has the unknown block type {kind}")
    _, values, size = BLOCK_TYPES[kind]
    if not shape or shape[-1] % values:
        raise ModelNotFound(f"{cursor.path}: tensor {name} has the shape {shape}")
    return name, shape, kind, offset, int(np.prod(shape, dtype=np.int64)) // values * size
