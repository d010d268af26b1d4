"""Which ops serve: the library that fits, or torch with one line in the log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from graft.common.errors import InvalidArgument, Unsupported
from graft.kernels.cpu.library import FOLDER, INSTRUCTION_SETS, available, load
from graft.kernels.cpu.select import select_cpu
from graft.kernels.ops import select

BUILD = Path(__file__).parents[2] / "kernels" / "build_native.py"


@pytest.fixture(autouse=True)
def fresh_logs() -> None:
    structlog.reset_defaults()


def run_build(compiler: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BUILD), "--force"],
        env={**os.environ, "CXX": compiler},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.skipif(not available(), reason="no native library was built")
def test_the_best_instruction_set_serves() -> None:
    ops = select("cpu", 1)
    assert ops.name == "native"
    assert ops.batch_invariant
    found = load()
    assert found is not None
    assert found[0] == available()[0]
    assert "portable" in available()
    assert list(available()) == [isa for isa in INSTRUCTION_SETS if isa in available()]


def test_an_unknown_instruction_set_is_not_found() -> None:
    assert load("mmx") is None


def test_torch_is_taken_on_request() -> None:
    ops = select("cpu", 1, "torch")
    assert ops.name == "torch"
    assert not ops.batch_invariant


def test_without_a_library_torch_serves_and_says_so_once(tmp_path: Path) -> None:
    with capture_logs() as logs:
        names = [select_cpu(1, "auto", tmp_path).name for _ in range(3)]
    assert names == ["torch"] * 3
    assert [line["event"] for line in logs] == ["native kernels not found, torch serves"]


def test_a_library_of_another_machine_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "libgraft_cpu_portable.so").write_bytes(b"not a library")
    assert available(tmp_path) == ()


def test_native_refuses_to_fall_back(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=tmp_path.name):
        select_cpu(1, "native", tmp_path)


def test_an_unknown_preference_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'fast'"):
        select_cpu(1, "fast")


def test_another_device_is_refused() -> None:
    with pytest.raises(Unsupported, match="cuda"):
        select("cuda")


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_building_without_a_compiler_succeeds_and_keeps_what_is_there(compiler: str) -> None:
    before = sorted(FOLDER.iterdir())
    built = run_build(compiler)
    assert built.returncode == 0
    assert built.stdout == ""
    assert "not built" in built.stderr
    assert sorted(FOLDER.iterdir()) == before
