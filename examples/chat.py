"""A chat, the same as a stream, and what speculation did for it."""

import asyncio
import os

from graft.client import Client, Options

ADDRESS = os.environ.get("GRAFT_GRPC", "127.0.0.1:8001")


async def main() -> None:
    async with Client(ADDRESS) as client:
        question = "Why is the sky blue?"
        options = Options(max_tokens=32, temperature=0.8, seed=7)

        answer = await client.chat(question, options)
        print("answer:", answer.text)

        print("stream: ", end="")
        async for piece in client.chat_stream(question, options):
            print(piece.text, end="", flush=True)
            if piece.speculation is not None:
                done = piece.speculation
                print(f"\nrounds: {done.num_rounds}, tokens a round: {done.accept_length:.2f}")


asyncio.run(main())
