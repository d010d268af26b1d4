"""One tiny target for all tests of the verify service."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graft.testing.models import write_tiny_model
from graft.testing.plain import Plain


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def plain(tiny_model: Path) -> Plain:
    """The tiny Llama, loaded."""
    torch.set_num_threads(1)
    return Plain.load(tiny_model)
