"""`graft complete`: one prompt, one text on standard output."""

from __future__ import annotations

from typing import Annotated

import typer

from graft.cli import request
from graft.cli.request import DEFAULT_URL, Law, prompt_of


def command(_name: str) -> typer.Typer:
    """The command."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.command(help="Complete one prompt at a running gateway; counts go to stderr.")
    def complete(
        prompt: Annotated[str, typer.Argument(help="The prompt, - for stdin, or @FILE.")],
        url: request.Url = DEFAULT_URL,
        api_key: request.ApiKey = None,
        model: request.Model = None,
        max_tokens: request.MaxTokens = 128,
        temperature: request.Temperature = 0.0,
        top_p: request.TopP = None,
        seed: request.Seed = None,
        stop: request.Stop = None,
        speculation: request.Speculation = None,
        show_speculation: request.Show = False,
    ) -> None:
        from rich.console import Console

        from graft.cli.answer import Answer, show, summary
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
        answer = Answer()
        body = law.body(prompt=prompt_of(prompt))
        show(client.stream("/v1/completions", body), Console(highlight=False), answer)
        if answer.usage:
            Console(stderr=True).print(summary(answer), style="dim", markup=False, soft_wrap=True)

    return app
