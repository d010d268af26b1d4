"""One streamed answer on the terminal, with the origin of each token in colour when asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

THOUGHT = "dim italic"
STYLES = {"accepted": "green", "bonus": "bold yellow", "plain": "dim"}
_MEANINGS = {
    "accepted": "guessed right",
    "bonus": "target's own on top",
    "plain": "no guess",
}


@dataclass(slots=True)
class Answer:
    """What was said, and the usage chunk that closed it."""

    text: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    metrics: Mapping[str, Any] | None = None
    thinking: bool = False


def legend() -> Text:
    """One line that names the colours."""
    line = Text()
    for origin, style in STYLES.items():
        line.append(origin, style=style)
        line.append(f" = {_MEANINGS[origin]}   ")
    return line


def show(chunks: Iterable[Mapping[str, Any]], console: Console, answer: Answer) -> None:
    """Prints a stream of chat or completion chunks as it comes and fills `answer` in place."""
    for chunk in chunks:
        if chunk.get("usage"):
            answer.usage = chunk["usage"]
        if chunk.get("metrics"):
            answer.metrics = chunk["metrics"]
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta") or {}
            text = delta.get("content") or choice.get("text") or ""
            thought = delta.get("reasoning_content") or ""
            if thought and "token_origins" not in choice:
                console.print(Text(printable(thought), style=THOUGHT), end="", soft_wrap=True)
                answer.thinking = True
            if text and answer.thinking:
                console.print("\n")
                answer.thinking = False
            answer.text += text
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            console.print(_seen(text, choice), end="", soft_wrap=True)
    console.print()


def summary(answer: Answer) -> str:
    """The answer's counts in one line, as far as the gateway sent them."""
    usage = answer.usage or {}
    words = [f"{usage.get('completion_tokens', '?')} tokens"]
    found = (answer.metrics or usage.get("metrics") or {}).get("speculative_decoding") or {}
    if found.get("num_spec_steps"):
        words.append(f"{found['num_spec_steps']} rounds with drafts")
        words.append(
            f"{found.get('num_accepted_draft_tokens', 0)} of {found.get('num_draft_tokens', 0)} "
            "drafted tokens accepted"
        )
        if found.get("mean_acceptance_length") is not None:
            words.append(f"{found['mean_acceptance_length']:.2f} tokens in each")
    if answer.finish_reason and answer.finish_reason != "stop":
        words.append(f"ended by {answer.finish_reason}")
    return ", ".join(words)


def _seen(text: str, choice: Mapping[str, Any]) -> Text:
    """A chunk's tokens in the colours of their origins, or its text where it carries no tokens.

    A token is sent with the last of its characters, so tokens may come a little after the text;
    both join to the same whole.
    """
    if "token_origins" not in choice:
        return Text(printable(text))
    line = Text()
    for token, origin in zip(choice["token_texts"], choice["token_origins"], strict=True):
        line.append(printable(str(token)), style=STYLES.get(str(origin), ""))
    return line


def printable(text: str) -> str:
    """The text without the control characters that could steer a terminal."""
    return "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f"))
