"""Services for a measurement: processes that start, answer and end, or say why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from graft.bench.services import Setup, running
from graft.common.errors import GraftError


@pytest.mark.timeout(300)
async def test_a_model_that_is_not_there_is_told(tmp_path: Path) -> None:
    setup = Setup(str(tmp_path / "nothing"), "fp32", 1)
    with pytest.raises(GraftError, match=r"did not start: .*nothing"):
        async with running(setup):
            raise AssertionError("it started")
