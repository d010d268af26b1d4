"""What litellm users do: completions, streams, async, tools, errors that map to its own."""

import asyncio
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no look-up of prices

import litellm

URL = os.environ["GRAFT_URL"] + "/v1"
COMMON = {"model": "openai/tiny", "api_base": URL, "api_key": "none", "num_retries": 0}
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add_to",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
    },
}

whole = litellm.completion(messages=HELLO, **COMMON)
text = whole.choices[0].message.content
assert text.endswith("😀") and whole.choices[0].finish_reason == "stop"
assert whole.usage.completion_tokens == len(text.encode())

chunks = list(
    litellm.completion(
        messages=HELLO, stream=True, stream_options={"include_usage": True}, **COMMON
    )
)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
rebuilt = litellm.stream_chunk_builder(chunks, messages=HELLO)
assert rebuilt.choices[0].message.content == text


async def at_once() -> None:
    answers = await asyncio.gather(
        *(litellm.acompletion(messages=HELLO, max_tokens=n, **COMMON) for n in range(1, 6))
    )
    for count, answer in enumerate(answers, 1):
        assert answer.choices[0].message.content == text[:count]
        assert answer.choices[0].finish_reason == "length"


asyncio.run(at_once())

ask = [{"role": "user", "content": "add_to 41 please"}]
for stream in (False, True):
    called = litellm.completion(messages=ask, tools=[TOOL], stream=stream, **COMMON)
    if stream:
        called = litellm.stream_chunk_builder(list(called), messages=ask)
    choice = called.choices[0]
    assert choice.finish_reason == "tool_calls", choice
    call = choice.message.tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("add_to", '{"number": 41}')

try:
    litellm.completion(messages=HELLO, **{**COMMON, "model": "openai/other"})
except litellm.NotFoundError as error:
    assert "other" in str(error)
else:
    raise AssertionError("another model was served")
try:
    litellm.completion(messages=HELLO, temperature=-1, **COMMON)
except litellm.BadRequestError:
    pass
else:
    raise AssertionError("a temperature below zero was served")
print("litellm is content")
