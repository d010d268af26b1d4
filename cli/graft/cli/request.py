"""The options that chat and complete share, and the request body they make."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

Url = Annotated[str, typer.Option(help="The gateway.", envvar="GRAFT_URL")]
ApiKey = Annotated[str | None, typer.Option(help="Key of the gateway.", envvar="GRAFT_API_KEY")]
Model = Annotated[str | None, typer.Option(help="Model; the first served one if not given.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Greatest number of tokens of an answer.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")]
TopP = Annotated[float | None, typer.Option(help="Share of probability kept.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")]
Speculation = Annotated[
    str | None, typer.Option(help="off, auto, or a proposer; the gateway's own if not given.")
]
Show = Annotated[
    bool, typer.Option("--show-speculation", help="Colour accepted, bonus and plain tokens.")
]
DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Law:
    """How to write: everything of a request but its words."""

    model: str
    max_tokens: int
    temperature: float
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    speculation: str | None = None
    show: bool = False

    def body(self, **words: Any) -> dict[str, Any]:
        """A request body; what was not given is left to the gateway."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream_options": {"include_usage": True},
            **words,
        }
        optional = {
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": self.stop or None,
            "speculation": _speculation(self.speculation),
            "return_token_ids": self.show or None,
        }
        body.update({key: value for key, value in optional.items() if value is not None})
        return body


def _speculation(word: str | None) -> Any:
    if word in (None, "off", "auto"):
        return word
    return {"proposer": word}


def prompt_of(words: str) -> str:
    """The prompt itself, standard input for ``-``, or a file for ``@path``."""
    if words == "-":
        return typer.get_text_stream("stdin").read()
    if words.startswith("@"):
        return Path(words[1:]).read_text()
    return words
