"""Native noise has the bits of the reference, for every size, seed and instruction set."""

from __future__ import annotations

import pytest
import torch

from graft.common.noise import uniforms
from graft.kernels.cpu.choose import Native
from graft.kernels.cpu.library import available, load
from graft.kernels.cpu.noise import noise
from graft.kernels.reference.float_math import log32


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("seed, position", [(0, 1), (2**64 - 1, 5), (2**63, 131071), (77, 0)])
def test_noise_equals_the_reference(isa: str, vocab_size: int, seed: int, position: int) -> None:
    found = load(isa)
    assert found is not None
    made = noise(seed, position, vocab_size, Native(found[1]))
    expected = torch.from_numpy(-log32(-log32(uniforms(seed, position, vocab_size))))
    assert torch.equal(made, expected)
