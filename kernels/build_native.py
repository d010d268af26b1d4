"""Compiles the native CPU kernels, one library for each instruction set of this architecture.

Runs at install time and on `make native`. Without a compiler nothing is built and torch serves.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NATIVE = Path(__file__).parent / "graft" / "kernels" / "cpu" / "native"
FLAGS = (
    "-std=c++20 -O3 -fno-math-errno -ffp-contract=off -fPIC -shared -fvisibility=hidden -pthread"
).split()
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"]


def instruction_sets() -> dict[str, list[str]]:
    """Name -> compiler flags, for this architecture."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return {"portable": [], "avx2": AVX2, "avx512": AVX512}
    return {"portable": []}


def compiler() -> list[str] | None:
    """CXX if set, else the first of g++, clang++, c++ that exists; None without one."""
    named = os.environ.get("CXX")
    if named:
        command = shlex.split(named)
        return command if shutil.which(command[0]) else None
    found = (shutil.which(name) for name in ("g++", "clang++", "c++"))
    return next(([path] for path in found if path), None)


def build(force: bool = False) -> list[Path]:
    """The libraries that are there afterwards; says on stderr why one is missing."""
    command = compiler()
    if command is None:
        print("no C++ compiler found: native kernels are not built", file=sys.stderr)
        return []
    sources = sorted(NATIVE.glob("*.cpp"))
    newest = max(p.stat().st_mtime for p in [*sources, *NATIVE.glob("*.h"), Path(__file__)])

    def one(isa: str, flags: list[str]) -> Path | None:
        target = NATIVE / f"libgraft_cpu_{isa}.so"
        if not force and target.exists() and target.stat().st_mtime > newest:
            return target
        fresh = target.with_suffix(f".{os.getpid()}.tmp")
        made = subprocess.run(
            [*command, *FLAGS, *flags, *map(str, sources), "-o", str(fresh)],
            capture_output=True,
            text=True,
        )
        if made.returncode != 0:
            print(f"{isa} kernels are not built:\n{made.stderr}", file=sys.stderr)
            fresh.unlink(missing_ok=True)
            return None
        fresh.replace(target)  # a process that has the old one mapped keeps it
        return target

    with ThreadPoolExecutor(2) as pool:
        built = pool.map(lambda item: one(*item), instruction_sets().items())
        return [path for path in built if path is not None]


if __name__ == "__main__":
    for library in build(force="--force" in sys.argv[1:]):
        print(library)
