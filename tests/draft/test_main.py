"""A draft replica as a process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest

from graft.common.errors import InvalidArgument
from graft.draft.settings import DraftSettings

_RUN = (
    "from graft.draft.main import run; from graft.draft.settings import DraftSettings; "
    "run(DraftSettings.load(None, {'port': 0, 'log_format': 'json'}))"
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_the_replica_and_it_exits_with_0(number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", _RUN], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if '"listening"' in line:
                break
        process.send_signal(number)
        _, rest = process.communicate(timeout=30)
        assert process.returncode == 0, rest
        assert '"stopped"' in rest
    finally:
        process.kill()
        process.wait()


def test_torch_is_not_loaded_for_ngram() -> None:
    code = "import sys, graft.draft.main; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_metrics_are_served_where_they_were_asked_for() -> None:
    import asyncio
    import urllib.request

    from graft.draft.server import DraftServer

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def scrape() -> str:
        server = DraftServer(DraftSettings.load(None, {"port": 0, "metrics_port": port}))
        await server.start()
        try:
            url = f"http://127.0.0.1:{port}/metrics"
            return await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
        finally:
            await server.stop(0)

    assert "graft_draft_sessions 0.0" in asyncio.run(scrape())


def test_a_typo_in_a_setting_is_answered_with_the_right_name() -> None:
    with pytest.raises(InvalidArgument, match="ngram_capacity"):
        DraftSettings.load(None, {"ngram_capacty": 5})
