"""Compiles every Triton kernel for three GPU generations on a machine that needs no GPU.

Prints registers, shared memory and spills per kernel and target, and fails on a spill. Knows the
kernels' own lists of compiled forms; runs nothing on a device.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

MODULES = (
    "accept",
    "adjust",
    "build_tree",
    "choose",
    "keep",
    "masks",
    "sample",
    "simulate",
    "support",
)
TARGETS = (80, 90, 100)
ASSEMBLERS = ("ptxas-blackwell", "ptxas")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one kernel costs on one target; sizes in bytes, registers and spills per thread."""

    name: str
    target: int
    registers: int
    shared: int
    spilled: int
    cubin_size: int
    seconds: float


def all_specs(modules: tuple[str, ...] = MODULES) -> list[Any]:
    """The compiled forms that the kernel modules list."""
    found: list[Any] = []
    for module in modules:
        found.extend(import_module(f"graft.kernels.gpu.{module}").SPECS)
    return found


def compile_spec(spec: Any, target: int) -> Compiled:
    """Compiles one form to a cubin and has the assembler report its resources.

    Pointers and extents are taken as multiples of 16, which is how the launchers meet them.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(spec.kernel.arg_names)
    types = iter(spec.arguments.split())
    signature = {n: "constexpr" if n in spec.constants else next(types) for n in names}
    assert next(types, None) is None, f"{spec.name} lists more arguments than its kernel has"
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or name in ("vocab", "segment")
    }
    source = ASTSource(
        fn=spec.kernel, signature=signature, constexprs=dict(spec.constants), attrs=attributes
    )
    started = time.perf_counter()
    options = {"num_warps": spec.num_warps, "enable_fp_fusion": False}
    built = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    seconds = time.perf_counter() - started
    registers, shared, spilled = _resources(str(built.asm["ptx"]), target)
    return Compiled(
        spec.name, target, registers, max(shared, built.metadata.shared), spilled,
        len(built.asm["cubin"]), seconds,
    )  # fmt: skip


def _resources(ptx: str, target: int) -> tuple[int, int, int]:
    """Registers, static shared bytes and spilled bytes of a kernel, as its assembler says.

    Triton ships two assemblers and picks by version and target; here the first that accepts the
    PTX speaks.
    """
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    architecture = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    assert architecture is not None, "the PTX names no target"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        for name in ASSEMBLERS if target >= 90 else reversed(ASSEMBLERS):
            if not (tools / name).exists():
                continue
            command = [str(tools / name), "-v", "--fmad=false", f"--gpu-name={architecture[1]}"]
            ran = subprocess.run(
                [*command, str(source), "-o", str(source.with_suffix(".cubin"))],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if ran.returncode == 0:
                break
        else:
            raise RuntimeError(f"no assembler beside Triton takes its PTX: {ran.stderr}")
    said = ran.stderr
    registers = _number(r"Used (\d+) registers", said)
    stored = _number(r"(\d+) bytes spill stores", said)
    return registers, _number(r"(\d+) bytes smem", said, missing=0), stored


def _number(pattern: str, text: str, missing: int | None = None) -> int:
    match = re.search(pattern, text)
    if match is None:
        assert missing is not None, f"the assembler did not say {pattern!r}: {text}"
        return missing
    return int(match[1])


def table(results: list[Compiled]) -> str:
    """A markdown table, one line a kernel and target."""
    lines = [
        "| kernel | target | registers | shared (B) | spilled (B) | cubin (B) | compiled in (s) |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for one in results:
        lines.append(
            f"| {one.name} | sm_{one.target} | {one.registers} | {one.shared} | {one.spilled} "
            f"| {one.cubin_size} | {one.seconds:.1f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Compiles, prints the table; 1 when a kernel spills."""
    parser = argparse.ArgumentParser(description="Compile every Triton kernel without a GPU.")
    parser.add_argument("--targets", type=int, nargs="+", default=list(TARGETS), metavar="CC")
    parser.add_argument("--modules", nargs="+", default=list(MODULES), choices=MODULES)
    parser.add_argument("--only", default="", help="compile the kernels whose name holds this")
    given = parser.parse_args(arguments)
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")
    results = [
        compile_spec(spec, target)
        for spec in all_specs(tuple(given.modules))
        if given.only in spec.name
        for target in given.targets
    ]
    print(table(results))
    spilled = [f"{one.name} for sm_{one.target}" for one in results if one.spilled]
    if spilled:
        print(f"spills registers: {', '.join(spilled)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
