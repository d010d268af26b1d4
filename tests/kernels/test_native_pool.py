"""Threads share the work: any number of callers, and none left behind."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from graft.kernels.cpu.library import available, load
from graft.kernels.cpu.native_ops import NativeOps
from graft.testing.kernel_rows import same_bits

pytestmark = pytest.mark.skipif(not available(), reason="no native library was built")


def make_ops(threads: int) -> NativeOps:
    found = load()
    assert found is not None
    return NativeOps(found[1], found[0], threads)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_more_threads_than_cores_change_nothing(threads: int) -> None:
    ops = make_ops(threads)
    weight = torch.randn(700, 96)
    packed, x = ops.pack([weight], [None]), torch.randn(5, 96)
    alone = make_ops(1)
    expected = alone.linear(x, alone.pack([weight], [None]))
    for _ in range(200):
        assert same_bits(ops.linear(x, packed), expected)


def test_callers_on_several_threads_get_their_own_results() -> None:
    ops = make_ops(2)
    weight = torch.randn(300, 64)
    packed = ops.pack([weight], [None])
    inputs = [torch.randn(rows, 64) for rows in (1, 3, 9, 20)]
    expected = [ops.linear(x, packed) for x in inputs]
    start = threading.Barrier(len(inputs))

    def call(i: int) -> bool:
        start.wait(10)
        return all(same_bits(ops.linear(inputs[i], packed), expected[i]) for _ in range(300))

    with ThreadPoolExecutor(len(inputs)) as callers:
        assert all(callers.map(call, range(len(inputs))))


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_threads_end_with_their_ops() -> None:
    """Counted by name: threads of other tests begin and end when they like."""
    before = _threads()
    ops = make_ops(6)
    begun = _threads() - before
    assert len(begun) >= 5
    del ops
    assert len(begun & _threads()) <= len(begun) - 5


def test_weights_outlive_their_ops() -> None:
    ops = make_ops(2)
    table = torch.randn(64, 8)
    packed = ops.pack([table], [None])
    del ops
    tokens = torch.tensor([63, 5], dtype=torch.int32)
    assert torch.equal(make_ops(1).embed(tokens, packed), table[tokens.long()])


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))
