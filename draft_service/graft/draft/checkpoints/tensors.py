"""Tensors of a draft checkpoint, handed out by name with every mismatch told by name.

Knows files and shapes; knows no network. Pickle files are opened on request only, and then with
torch's weights-only reader, which runs no code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graft.common.errors import ModelNotFound, Unsupported
from graft.common.model_files import read_json, weight_files

_PICKLES = ("pytorch_model.bin", "model.bin")
_PICKLE_INDEX = "pytorch_model.bin.index.json"
_SHOWN = 3


class Tensors:
    """All tensors of a checkpoint. Names may be rewritten; what is never asked for is left over."""

    def __init__(self, name: str, shapes: Mapping[str, tuple[int, ...]], read: _Read) -> None:
        self.name = name
        self._shapes = dict(shapes)
        self._stored = {name: name for name in shapes}
        self._read = read
        self._taken: set[str] = set()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return self._shapes

    def rename(self, rewrite: Callable[[str], str]) -> None:
        """Gives every tensor the name that `rewrite` makes of its own, in place.

        Raises:
            ModelNotFound: two tensors end up with one name.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        stored: dict[str, str] = {}
        for old, shape in self._shapes.items():
            new = rewrite(old)
            if new in shapes:
                raise ModelNotFound(
                    f"draft checkpoint {self.name} holds {stored[new]} and {self._stored[old]},"
                    " which mean the same tensor"
                )
            shapes[new], stored[new] = shape, self._stored[old]
        self._shapes, self._stored = shapes, stored

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def weight(self, name: str, *shape: int) -> Tensor:
        """A tensor as float32, after checking its shape.

        Raises:
            ModelNotFound: it is missing, or its shape is another.
        """
        return self.raw(name, *shape).to(torch.float32)

    def raw(self, name: str, *shape: int) -> Tensor:
        """As `weight`, in the type it is stored in."""
        found = self._shapes.get(name)
        if found is None:
            raise ModelNotFound(f"draft checkpoint {self.name} lacks tensor {name}")
        if found != shape:
            raise ModelNotFound(
                f"draft checkpoint {self.name}: {self._stored[name]} has the shape {list(found)},"
                f" expected {list(shape)}"
            )
        self._taken.add(name)
        return self._read(self._stored[name])

    def optional(self, name: str, *shape: int) -> Tensor | None:
        """As `weight`; None when there is no such tensor."""
        return self.weight(name, *shape) if name in self else None

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Every tensor must have been asked for, or match a pattern in `ignored`.

        Raises:
            ModelNotFound: some are left over.
        """
        patterns = [re.compile(one) for one in ignored]
        left = sorted(
            self._stored[name]
            for name in self._shapes.keys() - self._taken
            if not any(pattern.fullmatch(name) for pattern in patterns)
        )
        if left:
            more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
            word = "tensor" if len(left) == 1 else "tensors"
            raise ModelNotFound(
                f"draft checkpoint {self.name} has {word} {', '.join(left[:_SHOWN])}{more} left"
                " over: its layers are not what config.json says"
            )


_Read = Callable[[str], Tensor]


def open_tensors(folder: Path, *, allow_pickle: bool = False) -> Tensors:
    """The tensors of a folder: safetensors, or pickle files where they are allowed.

    Raises:
        ModelNotFound: there are none, or a file is damaged.
        Unsupported: there are only pickle files, and they are not allowed.
    """
    paths = weight_files(folder) or sorted(folder.glob("*.safetensors"))
    if paths:
        return _safetensors(folder.name, paths)
    pickles = _pickle_files(folder)
    if not pickles:
        raise ModelNotFound(f"{folder} has no model.safetensors")
    if not allow_pickle:
        raise Unsupported(
            f"{folder} holds its weights as a pickle file only ({pickles[0].name}):"
            " allow_pickle reads such files, without running code in them"
        )
    return _pickled(folder.name, pickles)


def read_pickle(path: Path) -> Any:
    """What a .pt or .bin file holds, read without running code in it.

    Raises:
        ModelNotFound: there is no such file, or it is damaged.
        Unsupported: it holds more than tensors and plain values.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ModelNotFound(f"there is no file {path}") from None
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "weights_only" in str(error) or "Weights only" in str(error):
            raise Unsupported(f"{path} holds more than tensors: {first}") from None
        raise ModelNotFound(f"{path} is damaged or cut short: {first}") from None


def _safetensors(name: str, paths: list[Path]) -> Tensors:
    files: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        try:
            file: Any = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelNotFound(f"{path} is damaged or cut short: {error}") from None
        for key in file.keys():
            if key in files:
                raise ModelNotFound(f"{path} holds {key}, which another file holds too")
            files[key] = file
            shapes[key] = tuple(file.get_slice(key).get_shape())

    def read(key: str) -> Tensor:
        tensor: Tensor = files[key].get_tensor(key)
        return tensor.clone()

    return Tensors(name, shapes, read)


def _pickle_files(folder: Path) -> list[Path]:
    if (folder / _PICKLE_INDEX).is_file():
        named = read_json(folder / _PICKLE_INDEX).get("weight_map") or {}
        return [folder / one for one in sorted(set(named.values()))]
    return [folder / one for one in _PICKLES if (folder / one).is_file()]


def _pickled(name: str, paths: list[Path]) -> Tensors:
    held: dict[str, Tensor] = {}
    for path in paths:
        content = read_pickle(path)
        if not isinstance(content, dict):
            raise ModelNotFound(f"{path} holds no tensors by name")
        held.update({key: one for key, one in content.items() if isinstance(one, Tensor)})
    return Tensors(name, {key: tuple(one.shape) for key, one in held.items()}, held.__getitem__)
