"""The scripts around the Triton kernels: the compiler's table, and the check that needs a GPU."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

KERNELS = Path(__file__).parents[2] / "kernels"


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a script without Triton's interpreter, which is on in this process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(KERNELS / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=600,
    )


def lines_of(table: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in table.splitlines() if "| sm_" in line]


def test_kernels_compile_for_hopper_without_a_gpu() -> None:
    ran = run_script(
        "gpu_compile.py", "--targets", "90", "--modules", "accept", "choose", "--only", "c"
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = lines_of(ran.stdout)
    assert {"accept", "choose", "choose reduce"} <= {line[0] for line in lines}
    assert all(line[1] == "sm_90" and 0 < int(line[2]) <= 255 for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel_compiles_for_every_target_without_a_spill() -> None:
    ran = run_script("gpu_compile.py")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = lines_of(ran.stdout)
    assert {line[1] for line in lines} == {"sm_80", "sm_90", "sm_100"}
    assert all(int(line[4]) == 0 for line in lines)
    modules = {path.stem for path in (KERNELS / "graft" / "kernels" / "gpu").glob("*.py")}
    listed = set(load("gpu_compile").MODULES)
    assert modules - listed == {"float_math", "noise", "pick", "spec", "threshold"}, (
        "device functions only"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_check_says_that_it_needs_a_gpu() -> None:
    ran = run_script("gpu_check.py")
    assert ran.returncode == 2
    assert "needs a CUDA device" in ran.stderr


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_check_finds_no_difference_in_the_interpreter() -> None:
    check = load("gpu_check")
    done = list(check.checks(np.random.default_rng(5), torch.device("cpu"), check.Size(2, 3, 40)))
    assert len(done) == 15
    assert [one.name for one in done if one.differing or not one.entries] == []


def load(name: str) -> Any:
    sys.path.insert(0, str(KERNELS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(KERNELS))
