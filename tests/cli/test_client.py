"""The small REST client and the answer on the terminal, against a real HTTP server."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from graft.cli.answer import Answer, printable, show, summary
from graft.cli.client import Client, GatewayRefused, GatewayUnreachable
from graft.cli.request import Law


@contextmanager
def gateway(body: bytes, status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """A server that gives the same answer to every request, and the requests it has seen."""
    seen: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _answer(self, sent: Any) -> None:
            seen.append((self.path, self.headers.get("authorization"), sent))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def events(*chunks: Any) -> bytes:
    """Chunks as a stream of events."""
    words = [chunk if isinstance(chunk, str) else json.dumps(chunk) for chunk in chunks]
    return "".join(f"data: {word}\n\n" for word in words).encode()


def delta(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None, **more}]}


def streamed(body: bytes, **environment: Any) -> list[dict[str, Any]]:
    with gateway(body) as (url, _):
        return list(Client(url).stream("/v1/chat/completions", {}))


def test_a_stream_gives_its_chunks_and_skips_comments() -> None:
    body = b": keep-alive\n\n" + events(delta("a"), delta("b"), "[DONE]")
    assert [chunk["choices"][0]["delta"]["content"] for chunk in streamed(body)] == ["a", "b"]


def test_an_error_inside_a_stream_is_raised_with_its_message() -> None:
    body = events(delta("a"), {"error": {"message": "verify is gone", "code": "no_replica"}})
    with pytest.raises(GatewayRefused, match=r"^verify is gone$"):
        streamed(body)


def test_a_stream_without_its_end_is_not_taken_for_a_whole_one() -> None:
    with pytest.raises(GatewayUnreachable, match="ended the answer early"):
        streamed(events(delta("a")))


def test_a_refusal_carries_the_gateways_own_sentence() -> None:
    body = json.dumps({"error": {"message": "model x is not served", "code": "x"}}).encode()
    with (
        gateway(body, 404) as (url, _),
        pytest.raises(GatewayRefused, match=r"model x is not served \(HTTP 404\)"),
    ):
        list(Client(url).stream("/v1/chat/completions", {}))


def test_an_answer_that_is_no_json_is_still_one_sentence() -> None:
    with gateway(b"<html>", 502) as (url, _), pytest.raises(GatewayRefused, match="HTTP 502"):
        Client(url).get("/v1/models")


def test_the_key_and_the_path_are_sent_and_v1_is_not_doubled() -> None:
    with gateway(b'{"data": [{"id": "owner/name"}]}') as (url, seen):
        assert Client(url + "/v1/", "secret").model() == "owner/name"
    assert seen == [("/v1/models", "Bearer secret", None)]


def test_only_given_settings_are_sent() -> None:
    body = Law("m", 8, 0.0).body(prompt="x")
    assert set(body) == {"model", "max_tokens", "temperature", "stream_options", "prompt"}
    body = Law("m", 8, 0.0, seed=3, speculation="ngram", show=True).body(prompt="x")
    assert body["seed"] == 3
    assert body["speculation"] == {"proposer": "ngram"}


def shown(*chunks: dict[str, Any], colour: bool = False) -> tuple[str, Answer]:
    out, answer = io.StringIO(), Answer()
    console = Console(file=out, force_terminal=colour, color_system="standard" if colour else None)
    show(chunks, console, answer)
    return out.getvalue(), answer


def test_an_answer_is_printed_as_it_comes() -> None:
    text, answer = shown(delta("Hello"), delta(" [b]you[/b]", finish_reason="length"))
    assert text == "Hello [b]you[/b]\n"
    assert (answer.text, answer.finish_reason) == ("Hello [b]you[/b]", "length")


def test_tokens_are_coloured_by_origin() -> None:
    traced = {"token_texts": ["Hel", "lo"], "token_origins": ["accepted", "bonus"]}
    text, answer = shown(delta("Hello", **traced), colour=True)
    assert text == "\x1b[32mHel\x1b[0m\x1b[1;33mlo\x1b[0m\n"
    assert answer.text == "Hello"


def test_reasoning_is_shown_apart_and_no_part_of_the_answer() -> None:
    thought = {"choices": [{"delta": {"reasoning_content": "Why? [b]"}}]}
    text, answer = shown(thought, delta("So."))
    assert text == "Why? [b]\n\nSo.\n"
    assert answer.text == "So."


def test_a_token_that_comes_after_its_text_is_shown_once() -> None:
    early = {"token_texts": ["Hel"], "token_origins": ["accepted"]}
    late = {"token_texts": ["lo"], "token_origins": ["plain"]}
    text, answer = shown(delta("Hello", **early), delta("", **late))
    assert (text, answer.text) == ("Hello\n", "Hello")


def test_text_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\n\tc\x9bd") == "a[2Jb\n\tcd"


def test_the_summary_says_what_speculation_did() -> None:
    found = {
        "num_spec_steps": 10,
        "num_accepted_draft_tokens": 15,
        "num_draft_tokens": 40,
        "mean_acceptance_length": 2.5,
    }
    answer = Answer("x", "length", {"completion_tokens": 25}, {"speculative_decoding": found})
    assert summary(answer) == (
        "25 tokens, 10 rounds with drafts, 15 of 40 drafted tokens accepted, 2.50 tokens in each, "
        "ended by length"
    )
