"""The rounds of an answer: what was drafted, what was kept, where the time went."""

import asyncio
import os

from graft.client import Client, Options

ADDRESS = os.environ.get("GRAFT_GRPC", "127.0.0.1:8001")


async def main() -> None:
    async with Client(ADDRESS) as client:
        options = Options(max_tokens=24, temperature=0, trace_rounds=True)
        answer = await client.complete("one two three one two three one two", options)
        for one in answer.choices[0].rounds:
            kept = f"{one.num_accepted} of {one.num_drafted} drafted kept"
            print(f"{one.number:3} {one.forward_s * 1e3:6.1f} ms  {kept:24} {''.join(one.texts)!r}")


asyncio.run(main())
