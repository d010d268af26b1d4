"""Bodies nobody meant: every one is answered, and none is the server's fault."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from graft.testing.front import running_front
from graft.testing.scripted_verify import Script

SAY = list(b"abcdefghijklmnopqrstuvwxyz" * 20)
COMMON = (
    "model temperature top_p top_k min_p seed stop stop_token_ids include_stop_str_in_output "
    "ignore_eos min_tokens presence_penalty frequency_penalty repetition_penalty logit_bias n "
    "stream stream_options user speculation skip_special_tokens cache_salt return_token_ids "
    "speculation_trace "
    "response_format regex ebnf prediction logprobs max_tokens max_completion_tokens other"
).split()
ROUTES = {
    "/v1/chat/completions": [*COMMON, "messages", "top_logprobs", "tools", "chat_template_kwargs"],
    "/v1/completions": [*COMMON, "prompt", "echo", "suffix", "best_of"],
    "/tokenize": ["prompt", "messages", "model", "add_special_tokens"],
    "/detokenize": ["tokens", "model"],
}
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 20, 319, 320, 1 << 31, 1 << 63, -(1 << 63), 10**30, 0.0,
    0.5, 1.5, -0.5, 1e308, "", "a", "off", "auto", "ngram", "\x00", "\ud83d", "😀", "x" * 600, [],
    {}, [1], [[]], [[1]], [""], ["a"], ["a", "b"], [None], {"a": 1}, {"1": 2.5}, {"-1": 1}, [{}],
    {"messages": 1}, {"proposer": "ngram"}, {"num_steps": 3}, {"include_usage": True},
    [{"role": "user", "content": "hi"}], [{"role": "user"}], [{"role": "king", "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "tool", "content": None}],
    [{"role": "assistant", "tool_calls": [{}], "content": 3}],
]  # fmt: skip


def bodies(route: str, rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": 3}
    if "messages" in ROUTES[route]:
        body["messages"] = [{"role": "user", "content": "hi"}]
    if route == "/v1/completions":
        body["prompt"] = "hi"
    for field in rng.sample(ROUTES[route], rng.randint(0, min(4, len(ROUTES[route])))):
        body[field] = rng.choice(VALUES)
    return body


async def test_no_body_is_answered_by_a_fault_of_the_server(tmp_path: Path) -> None:
    rng = random.Random(20)
    statuses: dict[int, int] = {}
    async with running_front(tmp_path, [Script(SAY, widths=(3,))]) as front:
        for _ in range(300):
            route = rng.choice(list(ROUTES))
            body = bodies(route, rng)
            response = await front.client.post(
                route,
                content=json.dumps(body).encode(),
                headers={"content-type": "application/json"},
            )
            assert response.status_code in (200, 400, 404), (body, response.text)
            if response.status_code != 200:
                error = response.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert isinstance(error["code"], str)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        await front.server.gateway.closings.drain()
        assert front.server.gateway.num_in_flight == 0
    assert statuses[200] > 20 and statuses[400] > 20
