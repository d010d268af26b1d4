"""`graft chat`: a conversation with a running gateway in the terminal."""

from __future__ import annotations

import contextlib
import importlib
from typing import Annotated, Any

import typer

from graft.cli import request
from graft.cli.request import DEFAULT_URL, Law


def command(_name: str) -> typer.Typer:
    """The command; with a message it answers once and ends."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.command(help="Chat with a running gateway. Ctrl-C ends an answer, Ctrl-D the chat.")
    def chat(
        message: Annotated[
            str | None, typer.Argument(help="Say this, print the answer and end.")
        ] = None,
        url: request.Url = DEFAULT_URL,
        api_key: request.ApiKey = None,
        model: request.Model = None,
        system: Annotated[str | None, typer.Option(help="The system message.")] = None,
        max_tokens: request.MaxTokens = 512,
        temperature: request.Temperature = 0.7,
        top_p: request.TopP = None,
        seed: request.Seed = None,
        stop: request.Stop = None,
        speculation: request.Speculation = None,
        show_speculation: request.Show = False,
    ) -> None:
        from graft.cli.client import Client

        client = Client(url, api_key)
        law = Law(
            model or client.model(),
            max_tokens,
            temperature,
            top_p,
            seed,
            stop,
            speculation,
            show_speculation,
        )
        messages = [{"role": "system", "content": system}] if system else []
        if message is not None:
            _say(client, law, messages, message)
            return
        _talk(client, law, messages)

    return app


def _talk(client: Any, law: Law, messages: list[dict[str, str]]) -> None:
    from rich.console import Console

    from graft.cli.answer import legend

    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives input() its line editing and history
    console = Console(highlight=False)
    console.print(f"{law.model} at {client.url}; /reset forgets, /exit ends", markup=False)
    if law.show:
        console.print(legend())
    system = list(messages)
    while True:
        try:
            words = input("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if words in ("/exit", "/quit"):
            return
        if words == "/reset":
            messages = list(system)
        elif words:
            messages = _turn(client, law, messages, words, console)


def _turn(
    client: Any, law: Law, messages: list[dict[str, str]], words: str, console: Any
) -> list[dict[str, str]]:
    """One turn of a chat; a failed one is told and forgotten, so that it can be said again."""
    from graft.common.errors import GraftError

    try:
        return _say(client, law, messages, words)
    except GraftError as error:
        console.print(f"error: {error}", style="red", markup=False)
        return messages


def _say(client: Any, law: Law, messages: list[dict[str, str]], words: str) -> list[dict[str, str]]:
    """Sends one message and prints the answer; returns the longer conversation."""
    from rich.console import Console

    from graft.cli.answer import Answer, show, summary

    console = Console(highlight=False)
    messages = [*messages, {"role": "user", "content": words}]
    answer = Answer()
    chunks = client.stream("/v1/chat/completions", law.body(messages=messages))
    try:
        show(chunks, console, answer)
    except KeyboardInterrupt:
        console.print("\n(stopped)", style="dim")
    finally:
        chunks.close()
    if answer.usage and (law.show or console.is_terminal):
        console.print(summary(answer), style="dim", markup=False, soft_wrap=True)
    return [*messages, {"role": "assistant", "content": answer.text}]
