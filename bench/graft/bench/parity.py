"""Asks a running gateway the same questions with speculation on and off and compares the texts.

Knows the REST surface only, so it checks the path that clients use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from graft.bench.prompts import Prompt
from graft.common.errors import GraftError

REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Law:
    """One way to sample: a temperature and, above zero, a seed."""

    temperature: float
    seed: int | None = None


LAWS = (Law(0.0), Law(0.8, seed=7))


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer and what its speculation record said."""

    text: str
    num_tokens: int
    num_rounds: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int


@dataclass(frozen=True, slots=True)
class Pair:
    """One question under one law, answered with speculation and without."""

    prompt: Prompt
    law: Law
    speculated: Answer
    plain: Answer

    @property
    def equal(self) -> bool:
        """True when both answers are the same text with the same number of tokens."""
        same_text = self.speculated.text == self.plain.text
        return same_text and self.speculated.num_tokens == self.plain.num_tokens

    @property
    def first_difference(self) -> int | None:
        """The first character at which the texts part, or None."""
        if self.equal:
            return None
        texts = self.speculated.text, self.plain.text
        for i, (a, b) in enumerate(zip(*texts, strict=False)):
            if a != b:
                return i
        return min(map(len, texts))


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one run."""

    pairs: tuple[Pair, ...]

    @property
    def num_equal(self) -> int:
        """Pairs whose texts are equal."""
        return sum(pair.equal for pair in self.pairs)

    @property
    def accept_length(self) -> float:
        """Tokens per target forward of the speculated answers, bonus included."""
        rounds = sum(pair.speculated.num_rounds for pair in self.pairs)
        accepted = sum(pair.speculated.num_accepted_draft_tokens for pair in self.pairs)
        return 1.0 + accepted / rounds if rounds else 1.0

    def as_json(self) -> dict[str, Any]:
        """One object for machines."""
        return {
            "pairs": len(self.pairs),
            "equal": self.num_equal,
            "accept_length": round(self.accept_length, 4),
            "differences": [
                {
                    "prompt": pair.prompt.text[:80],
                    "law": asdict(pair.law),
                    "at_character": pair.first_difference,
                }
                for pair in self.pairs
                if not pair.equal
            ],
        }


async def run(
    url: str,
    prompts: Sequence[Prompt],
    *,
    laws: Sequence[Law] = LAWS,
    max_tokens: int = 64,
    concurrency: int = 1,
    api_key: str | None = None,
    on_pair: Callable[[Pair], None] | None = None,
) -> Report:
    """Compares every prompt under every law, `concurrency` questions at a time.

    Raises:
        GraftError: the gateway answers with an error or cannot be reached.
    """
    places = asyncio.Semaphore(concurrency)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=2 * concurrency + 2)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=REQUEST_TIMEOUT_S, limits=limits
    ) as client:
        model = await _model(client)

        async def compare(prompt: Prompt, law: Law) -> Pair:
            async with places:
                answers = [
                    await _ask(client, _body(model, prompt, law, max_tokens, mode))
                    for mode in ("auto", "off")
                ]
            pair = Pair(prompt, law, *answers)
            if on_pair is not None:
                on_pair(pair)
            return pair

        pairs = await asyncio.gather(*(compare(p, law) for p in prompts for law in laws))
    return Report(tuple(pairs))


def _body(model: str, prompt: Prompt, law: Law, max_tokens: int, mode: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt.text}],
        "max_tokens": max_tokens,
        "temperature": law.temperature,
        "speculation": mode,
    }
    if law.seed is not None:
        body["seed"] = law.seed
    return body


async def _model(client: httpx.AsyncClient) -> str:
    models = await _call(client, "GET", "/v1/models")
    return str(models["data"][0]["id"])


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    answer = await _call(client, "POST", "/v1/chat/completions", body)
    record = answer.get("metrics", {}).get("speculative_decoding") or {}
    return Answer(
        text=answer["choices"][0]["message"]["content"] or "",
        num_tokens=answer["usage"]["completion_tokens"],
        num_rounds=record.get("num_rounds", 0),
        num_draft_tokens=record.get("num_draft_tokens", 0),
        num_accepted_draft_tokens=record.get("num_accepted_draft_tokens", 0),
    )


async def _call(
    client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    try:
        response = await client.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise GraftError(f"{client.base_url} did not answer: {error!r}") from None
    if response.status_code != 200:
        raise GraftError(f"{path} answered {response.status_code}: {response.text[:300]}")
    answer: dict[str, Any] = response.json()
    return answer
