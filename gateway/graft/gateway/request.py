"""What clients may ask for: the fields of the two generation routes, their types and ranges.

Knows no tokenizer and no service. Fields nobody knows are kept aside and named; a known field
that is not offered is refused by name. REST and gRPC requests both become these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from graft.common.errors import InvalidArgument, Unsupported
from graft.gateway.guided import (
    MAX_CHOICES,
    StructuredOutputs,
    Wanted,
    by_old_names,
    wanted_of,
)
from graft.gateway.structured import ResponseFormat, Structure, structure_of

MAX_STOPS = 4
MAX_PREDICTION_CHARS = 1 << 20
MAX_STOP_CHARS = 1024
MAX_TOP_LOGPROBS = 20
MAX_N = 128
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096


class Fields(BaseModel):
    """Base of request bodies: strict types, null means the default, unknown fields are kept."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {key: item for key, item in value.items() if item is not None}

    @property
    def unknown(self) -> list[str]:
        """Names of fields that are not ours, sorted."""
        return sorted(self.model_extra or {})

    @property
    def unheeded(self) -> list[str]:
        """Names of all that is read and has no effect; unknown fields first."""
        return self.unknown


class SpeculationField(BaseModel):
    """A tier by hand; what is left out comes from the proposer's default."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    proposer: str | None = None
    num_steps: int | None = Field(default=None, ge=0)
    topk: int | None = Field(default=None, ge=1)
    num_draft_tokens: int | None = Field(default=None, ge=0)
    lookahead: int | None = Field(default=None, ge=0)


class PredictedPart(Fields):
    """One part of a prediction's content."""

    type: Literal["text"] = "text"
    text: str = Field(max_length=MAX_PREDICTION_CHARS)


class Prediction(Fields):
    """What the client expects the output to be; it speeds the text up and never changes it."""

    type: Literal["content"] = "content"
    content: str | list[PredictedPart] = Field(max_length=MAX_PREDICTION_CHARS)

    @property
    def text(self) -> str:
        """All parts as one."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class StreamOptions(Fields):
    """How a stream reports usage."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationFields(Fields):
    """The fields that both generation routes share."""

    not_offered: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: str | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, lt=1 << 31)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 64)
    stop: str | list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list, max_length=256)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=100.0)
    logit_bias: dict[str, float] = Field(default_factory=dict, max_length=300)
    n: int = Field(default=1, ge=1, le=MAX_N)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    speculation: str | SpeculationField | None = None
    accept_rule: Literal["coupled", "target_only", "rejection", "block"] | None = None
    threshold_single: float = Field(default=1.0, gt=0.0, le=1.0)
    threshold_acc: float = Field(default=1.0, gt=0.0, le=1.0)
    skip_special_tokens: bool = True
    cache_salt: str = Field(default="", max_length=256)
    return_token_ids: bool = False
    speculation_trace: bool = False
    response_format: ResponseFormat | None = None
    regex: str | None = Field(
        default=None, description="Expression that the answer matches as a whole."
    )
    ebnf: str | None = Field(default=None, description="Rules, of which `root` derives the answer.")
    prediction: Prediction | None = None
    guided_json: JsonValue = Field(default=None, description="vLLM's name for a JSON schema.")
    guided_regex: str | None = Field(default=None, description="vLLM's name for `regex`.")
    guided_choice: list[str] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_CHOICES,
        description="vLLM's field: the texts of which the answer is one.",
    )
    guided_grammar: str | None = Field(default=None, description="vLLM's name for `ebnf`.")
    structured_outputs: StructuredOutputs | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, one or several."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check(self) -> None:
        """Refuses what is known and not offered, and what the types do not say.

        Raises:
            InvalidArgument, Unsupported: the sentence and `field` name the field.
        """
        for name, harmless in self.not_offered.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise Unsupported(f"{name} is not offered by this server", field=name)
        if len(self.stops) > MAX_STOPS:
            raise InvalidArgument(
                f"stop holds {len(self.stops)} strings, at most {MAX_STOPS} are allowed",
                field="stop",
            )
        for stop in self.stops:
            if not 0 < len(stop) <= MAX_STOP_CHARS:
                raise InvalidArgument(
                    f"a stop string has {len(stop)} characters, expected 1 to {MAX_STOP_CHARS}",
                    field="stop",
                )
        if self.accept_rule != "target_only":
            for name in ("threshold_single", "threshold_acc"):
                if getattr(self, name) < 1.0:
                    raise InvalidArgument(
                        f'{name} is lossy and needs "accept_rule": "target_only"', field=name
                    )
        if self.stream_options is not None and not self.stream:
            raise InvalidArgument("stream_options needs stream", field="stream_options")
        self.biases()
        token_ids("stop_token_ids", self.stop_token_ids)
        if self.structure() is not None and self.ignore_eos:
            raise InvalidArgument(
                "ignore_eos has no meaning beside a grammar, which says where the text ends",
                field="ignore_eos",
            )

    def structure(self) -> Structure | None:
        """What the answer is held to; None where it is free.

        Raises:
            InvalidArgument: the fields contradict each other.
        """
        return structure_of(self.response_format, self.regex, self.ebnf, self._guided())

    def _guided(self) -> dict[str, Wanted]:
        try:
            wanted = wanted_of(
                self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
            )
        except InvalidArgument as error:
            raise InvalidArgument(f"guided_json: {error}", field="guided_json") from None
        if self.structured_outputs is None:
            return by_old_names(wanted)
        try:
            return {**by_old_names(wanted), **self.structured_outputs.wanted()}
        except InvalidArgument as error:
            field = "structured_outputs.json"
            raise InvalidArgument(f"{field}: {error}", field=field) from None

    def biases(self) -> dict[int, float]:
        """logit_bias by token id.

        Raises:
            InvalidArgument: a key is no token id.
        """
        found = {}
        for key, bias in self.logit_bias.items():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise InvalidArgument(
                    f"logit_bias has the key {key[:20]!r}, expected a token id", field="logit_bias"
                )
            found[int(key)] = bias
        return found


Tokens = Annotated[list[int], Field(min_length=1)]


class CompletionRequest(GenerationFields):
    """The body of POST /v1/completions."""

    not_offered: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationFields.not_offered,
        "suffix": ("",),
    }

    prompt: str | Tokens | list[str] | list[Tokens]
    max_tokens: int | None = Field(default=None, ge=0)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(default=None, ge=1)
    suffix: JsonValue = None

    def check(self) -> None:
        """As the base, and the few rules between fields."""
        super().check()
        if self.max_tokens == 0 and self.max_completion_tokens is None and not self.echo:
            raise InvalidArgument("max_tokens is 0, which needs echo", field="max_tokens")
        if self.best_of is not None and self.best_of != self.n:
            raise Unsupported("best_of is not offered by this server", field="best_of")
        if not self.prompt and not isinstance(self.prompt, str):
            raise InvalidArgument("prompt is an empty list", field="prompt")
        if len(self.prompts) > MAX_PROMPTS:
            raise InvalidArgument(
                f"prompt holds {len(self.prompts)} prompts, limit is {MAX_PROMPTS}", field="prompt"
            )

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one: texts or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        return [one for one in prompt if not isinstance(one, int)]


def token_ids(field: str, tokens: Iterable[int], vocab_size: int = 1 << 31) -> None:
    """Refuses ids that are not in the vocabulary.

    Raises:
        InvalidArgument: an id is negative or too great.
    """
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise InvalidArgument(
                f"{field} holds {token}, expected token ids of 0 to {vocab_size - 1}", field=field
            )
