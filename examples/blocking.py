"""The client in a program without an event loop, and an error that says what to change."""

import os

from graft.client import BlockingClient, CallFailed, Options

ADDRESS = os.environ.get("GRAFT_GRPC", "127.0.0.1:8001")

with BlockingClient(ADDRESS) as client:
    print(client.server_info().model, client.tokenize("hello"))
    for piece in client.complete_stream("Once upon a time", Options(max_tokens=16)):
        print(piece.text, end="", flush=True)
    print()
    try:
        client.complete("x", Options(temperature=-1))
    except CallFailed as failure:
        print(f"{failure.code} {failure.reason} in {failure.field}: {failure}")
