"""The cost of a forward by rows: the shape of what is reported, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from graft.bench import verify_cost
from graft.bench.limits import Limits
from graft.common.errors import Unsupported
from graft.kernels.cpu.library import available
from graft.models.storage import Precision
from graft.testing.gguf_models import write_gguf
from graft.testing.models import write_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = write_tiny_model(tmp_path / "tiny")
    write_gguf(folder, folder / "tiny.gguf", gguf.GGMLQuantizationType.Q4_1)
    (folder / "model.safetensors").unlink()
    return str(folder)


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_cost, "Limits", lambda ops: Limits(ops, 1 << 20))


def test_every_precision_has_a_time_for_every_row_count(model: str) -> None:
    heard: list[None] = []
    cost = verify_cost.run(
        model,
        [Precision.FP32, Precision.Q4_1],
        threads=1,
        rounds=2,
        rows=(1, 4),
        context=32,
        on_round=lambda: heard.append(None),
    )
    answer = cost.as_json()
    assert list(answer) == ["stream_gb_s", "fp32", "q4_1"]
    assert list(answer["fp32"]) == list(answer["q4_1"]) == ["1", "4"]
    assert min(answer["stream_gb_s"], *answer["fp32"].values(), *answer["q4_1"].values()) > 0
    assert len(heard) == 3
    page = cost.page({})
    assert len(page.tables[0].rows) == 4 and len(page.plots) == 2
    assert [row[:3] for row in page.tables[1].rows[:2]] == [
        ("fp32", 1, "q, k, v"),
        ("fp32", 1, "attention output"),
    ]
    assert len(page.tables[1].rows) == 2 * 7
    # Without a native library torch unpacks the blocks, and both hold the same.
    fp32, q4_1 = (held.num_bytes for held in cost.costs)
    assert q4_1 < fp32 if available() else q4_1 == fp32


def test_the_bound_is_bytes_or_operations_whichever_takes_longer() -> None:
    costs = verify_cost.Costs("fp32", "fp32", 4_000_000, 2_000_000, {1: 1.0}, {1: 1.0})
    found = verify_cost.VerifyCost(2.0, 8.0, (costs,))
    assert found.bound_ms(costs, 1) == pytest.approx(2.0)
    assert found.bound_ms(costs, 16) == pytest.approx(4.0)


def test_a_precision_the_model_has_not_is_refused(model: str) -> None:
    with pytest.raises(Unsupported, match="q8_0 was asked for"):
        verify_cost.run(model, [Precision.Q8_0], threads=1, rounds=1)
