"""The client of programs without a loop, against a gateway in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from graft.client import BlockingClient, CallFailed, Options
from graft.testing.elsewhere import gateway_elsewhere


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with gateway_elsewhere(tmp_path_factory.mktemp("front")) as served:
        yield served.grpc


def test_every_call_of_the_client_is_there(address: str) -> None:
    with BlockingClient(address, timeout_s=30) as client:
        answer = client.chat("Say it.", Options(max_tokens=4, temperature=0))
        assert answer.usage.num_completion == 4
        pieces = [*client.chat_stream("Say it.", Options(max_tokens=4, temperature=0))]
        assert "".join(piece.text for piece in pieces) == answer.text
        assert client.complete("a", Options(max_tokens=2), echo=True).text.startswith("a")
        assert [*client.complete_stream("a", Options(max_tokens=2))][-1].usage is not None
        assert client.detokenize(client.tokenize("hello")) == "hello"
        assert [model.id for model in client.models()] == [client.server_info().model]
        with pytest.raises(CallFailed):
            client.chat("x", model="another")


def test_a_stream_that_is_left_leaves_no_thread(address: str) -> None:
    before = threading.active_count()
    with BlockingClient(address, timeout_s=30) as client:
        for piece in client.complete_stream("a", Options(max_tokens=200)):
            if piece.text:
                break
        assert client.server_info().state == "ready"
    assert threading.active_count() <= before + 1


def test_the_sources_of_the_client_name_no_model_code() -> None:
    folder = Path(__file__).resolve().parents[2] / "client"
    text = "".join(path.read_text() for path in folder.rglob("*.py"))
    assert "torch" not in text and "graft.gateway" not in text
