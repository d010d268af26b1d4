"""`graft inspect`: one answer with the tree of each of its rounds, as the page shows it."""

from __future__ import annotations

from typing import Annotated

import typer

from graft.cli import request
from graft.cli.request import DEFAULT_URL, Law, prompt_of


def command(_name: str) -> typer.Typer:
    """The command."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.command(help="Ask a running gateway and show the tree of each round of the answer.")
    def inspect(
        prompt: Annotated[str, typer.Argument(help="The message, - for stdin, or @FILE.")],
        url: request.Url = DEFAULT_URL,
        api_key: request.ApiKey = None,
        model: request.Model = None,
        max_tokens: request.MaxTokens = 64,
        temperature: request.Temperature = 0.0,
        top_p: request.TopP = None,
        seed: request.Seed = None,
        stop: request.Stop = None,
        speculation: request.Speculation = None,
        raw: Annotated[bool, typer.Option("--raw", help="Continue the text, no chat.")] = False,
        as_json: Annotated[
            bool, typer.Option("--json", help="Print a recording that the page can open.")
        ] = False,
    ) -> None:
        import json

        from rich.console import Console

        from graft.cli.client import Client
        from graft.cli.rounds import Recording, round_view, totals

        client = Client(url, api_key)
        law = Law(
            model or client.model(), max_tokens, temperature, top_p, seed, stop, speculation, True
        )
        words = prompt_of(prompt)
        path = "/v1/completions" if raw else "/v1/chat/completions"
        said = {"prompt": words} if raw else {"messages": [{"role": "user", "content": words}]}
        recording = Recording(words, law.model, law.body())
        console = Console(highlight=False, soft_wrap=True)
        for chunk in client.stream(path, {**law.body(**said), "speculation_trace": True}):
            for one in recording.take(chunk):
                if not as_json:
                    console.print(round_view(one))
        if as_json:
            print(json.dumps(recording.as_body()))
            return
        for line in totals(recording.rounds):
            console.print(line, style="bold", markup=False)

    return app
