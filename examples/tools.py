"""A function that has to be called, its result, and the conversation going on with it."""

import asyncio
import json
import os

from graft.client import Client, Message, Options, Tool

ADDRESS = os.environ.get("GRAFT_GRPC", "127.0.0.1:8001")
WEATHER = Tool(
    "weather",
    "Tells the weather of a city.",
    {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris", "Oslo"]}},
        "required": ["city"],
    },
)


async def main() -> None:
    async with Client(ADDRESS) as client:
        conversation = [Message("user", "How is the weather in Rome?")]
        forced = Options(max_tokens=64, seed=7, tools=[WEATHER], tool_choice=WEATHER)
        answer = await client.chat(conversation, forced)
        for call in answer.calls:
            print("call:", call.name, json.loads(call.arguments))

        conversation.append(Message.of(answer.choices[0]))
        conversation += [Message("tool", "Sunny.", call_id=call.id) for call in answer.calls]
        answer = await client.chat(conversation, Options(max_tokens=32, seed=7))
        print("answer:", answer.text)


asyncio.run(main())
