"""A drafter's own projection of target features, as a small file that the verify side can apply.

    one RMSNorm over the joined states, or one for each state, or none
    -> fc [width, states * hidden], with or without bias
    -> one RMSNorm over the result, or none

Knows names, shapes and a digest; computes nothing. A drafter writes it from its checkpoint, the
verify service reads it, and both know it by the same id.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from graft.common.errors import InvalidArgument, ModelNotFound
from graft.common.tree import FloatArray

_FC, _BIAS = "fc.weight", "fc.bias"
_JOINED_NORM, _OUT_NORM = "input_norm.weight", "hidden_norm.weight"
_STATE_NORM = "fc_norm.{}.weight"


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """What turns one row of target states into one row for the drafter; all float32.

    layers, final_norm: the states it takes, as in FeatureSpec.
    weight: [width, len(layers) * hidden]; bias: [width].
    joined_norm: [len(layers) * hidden]; state_norms: one [hidden] for each layer, or none at all.
    out_norm: [width].
    """

    layers: tuple[int, ...]
    weight: FloatArray
    final_norm: bool = True
    bias: FloatArray | None = None
    joined_norm: FloatArray | None = None
    state_norms: tuple[FloatArray, ...] = ()
    out_norm: FloatArray | None = None
    eps: float = 1e-6

    def __post_init__(self) -> None:
        """Raises:
        InvalidArgument: a tensor has a shape that does not go with the others.
        """
        count = len(self.layers)
        if self.weight.ndim != 2 or not count or self.weight.shape[1] % count:
            raise InvalidArgument(
                f"{_FC} is {list(self.weight.shape)}, expected [width, {count} * hidden]"
            )
        if self.joined_norm is not None and self.state_norms:
            raise InvalidArgument(f"{_JOINED_NORM} and {_STATE_NORM.format(0)} exclude each other")
        if len(self.state_norms) not in (0, count):
            raise InvalidArgument(f"{len(self.state_norms)} norms were given for {count} states")
        expected = {_BIAS: self.width, _JOINED_NORM: self.weight.shape[1], _OUT_NORM: self.width}
        expected |= {_STATE_NORM.format(i): self.hidden_size for i in range(count)}
        for name, tensor in self.tensors().items():
            if name != _FC and tensor.shape != (expected[name],):
                raise InvalidArgument(
                    f"{name} is {list(tensor.shape)}, expected [{expected[name]}]"
                )

    @property
    def width(self) -> int:
        """Values of a projected row."""
        return int(self.weight.shape[0])

    @property
    def hidden_size(self) -> int:
        """Width of one state of the target."""
        return int(self.weight.shape[1]) // len(self.layers)

    @property
    def fused_id(self) -> str:
        """A digest of everything that decides the result, in hex."""
        digest = hashlib.sha256(
            f"{self.layers} {self.final_norm} {np.float32(self.eps).tobytes().hex()}".encode()
        )
        for name, tensor in sorted(self.tensors().items()):
            digest.update(f"{name} {tensor.shape}".encode())
            digest.update(np.ascontiguousarray(tensor, "<f4").tobytes())
        return digest.hexdigest()[:32]

    def tensors(self) -> dict[str, FloatArray]:
        """The tensors there are, by their names in the file."""
        optional = {_BIAS: self.bias, _JOINED_NORM: self.joined_norm, _OUT_NORM: self.out_norm}
        named = {_FC: self.weight} | {k: t for k, t in optional.items() if t is not None}
        return named | {_STATE_NORM.format(i): t for i, t in enumerate(self.state_norms)}


def write_projection(projection: Projection, path: Path) -> None:
    """A safetensors file whose metadata says which states it takes."""
    metadata = {
        "graft": "feature projection",
        "layers": ",".join(map(str, projection.layers)),
        "final_norm": "true" if projection.final_norm else "false",
        "eps": repr(projection.eps),
    }
    save_file(
        {name: np.ascontiguousarray(t, np.float32) for name, t in projection.tensors().items()},
        path,
        metadata,
    )


def read_projection(path: Path) -> Projection:
    """Reads what `write_projection` wrote.

    Raises:
        ModelNotFound: there is no such file, or it is damaged or not a projection.
        InvalidArgument: its tensors do not go together.
    """
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}
    except (OSError, SafetensorError, TypeError) as error:
        raise ModelNotFound(f"cannot read the projection {path}: {error}") from None
    try:
        layers = tuple(int(layer) for layer in metadata["layers"].split(","))
        final_norm, eps = metadata["final_norm"] == "true", float(metadata["eps"])
        weight = tensors.pop(_FC)
    except (KeyError, ValueError) as error:
        raise ModelNotFound(f"{path} is not a feature projection: {error!r}") from None
    names = [_STATE_NORM.format(index) for index in range(len(layers))]
    projection = Projection(
        layers=layers,
        weight=weight,
        final_norm=final_norm,
        bias=tensors.pop(_BIAS, None),
        joined_norm=tensors.pop(_JOINED_NORM, None),
        state_norms=tuple(tensors.pop(name) for name in names if name in tensors),
        out_norm=tensors.pop(_OUT_NORM, None),
        eps=eps,
    )
    if tensors:
        raise ModelNotFound(f"{path} holds {sorted(tensors)[0]}, which no projection has")
    return projection
