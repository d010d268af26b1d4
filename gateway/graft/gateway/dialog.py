"""How a model is talked to: its template, its way to call functions, its way to think.

Makes the prompt's text from messages and functions, and says how the answer is to be read. Knows
no tokenizer and no service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graft.common.errors import InvalidArgument
from graft.gateway.chat_template import ChatTemplate
from graft.gateway.functions import FunctionUse
from graft.gateway.preamble import in_plain_words
from graft.gateway.speech.calls import FORMATS, CallFormat
from graft.gateway.speech.reader import PLAIN, Speech
from graft.gateway.speech.reasoning import REASONING, ReasoningFormat

NO_FUNCTIONS = FunctionUse()


@dataclass(frozen=True, slots=True)
class Dialog:
    """A template with the formats of its family. `reasoning` is None where nothing is split off."""

    template: ChatTemplate
    calls: CallFormat
    reasoning: ReasoningFormat | None = None

    @classmethod
    def of(cls, template: ChatTemplate, calls: str = "auto", reasoning: str = "auto") -> Dialog:
        """The dialog of a template; `auto` reads the formats off the marks it writes.

        Raises:
            InvalidArgument: there is no format of that name.
        """
        if calls == "auto":
            calls = _calls_of(template)
        if reasoning == "auto":
            reasoning = "think" if "</think>" in template.source else "off"
        for name, known, field in (
            (calls, {*FORMATS}, "tool_call_parser"),
            (reasoning, {*REASONING, "off"}, "reasoning_parser"),
        ):
            if name not in known:
                raise InvalidArgument(
                    f"{field} is {name!r}, expected auto or {', '.join(sorted(known))}", field=field
                )
        return cls(template, FORMATS[calls], REASONING.get(reasoning))

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that must stay in the text for it to be read, though tokens of them be special."""
        reasoning = self.reasoning
        thoughts = () if reasoning is None else (reasoning.opens, reasoning.closes)
        return (*self.calls.markers, *thoughts)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        use: FunctionUse = NO_FUNCTIONS,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt that asks for the next message.

        Raises:
            InvalidArgument: the template refuses the conversation.
        """
        tools = use.for_template()
        if self.template.knows_tools:
            return self.template.render(messages, extra, tools)
        return self.template.render(in_plain_words(messages, tools, self.calls), extra)

    def speech(self, use: FunctionUse, prompt: str, *, held: bool = False) -> Speech:
        """How the answer to a rendered prompt is to be read.

        One that is `held` to a grammar has neither reasoning nor calls in it, unless it is a call
        that is forced: that is plain JSON.
        """
        if use.forced:
            return Speech(FORMATS["json"], use.names, use.parallel)
        if held:
            return PLAIN
        reasoning = self.reasoning
        return Speech(
            calls=self.calls if use.functions else None,
            functions=use.names,
            parallel=use.parallel,
            reasoning=reasoning,
            inside=reasoning is not None and prompt.rstrip().endswith(reasoning.opens),
        )


def _calls_of(template: ChatTemplate) -> str:
    """The format whose mark the template writes; the one of the preamble if it knows no tools."""
    for name in ("mistral", "hermes", "llama3_json"):
        form = FORMATS[name]
        if (form.opens or form.prefix) in template.source:
            return name
    return "json" if template.knows_tools else "hermes"
