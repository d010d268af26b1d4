"""A client of Graft's gateway over gRPC: `Client` for asyncio, `BlockingClient` for others.

async with Client("127.0.0.1:8001") as client:
    answer = await client.chat("Why is the sky blue?", Options(max_tokens=64))
    print(answer.text)
"""

from graft.client.answers import (
    Answer,
    Call,
    CallPiece,
    Choice,
    Model,
    Origin,
    Piece,
    PromptToken,
    Reason,
    Replica,
    Round,
    ServerInfo,
    Speculation,
    Token,
    Tree,
    Usage,
)
from graft.client.blocking import BlockingClient
from graft.client.client import Client
from graft.client.failure import CallFailed
from graft.client.options import Message, Options, Tool, Wish

__all__ = [
    "Answer",
    "BlockingClient",
    "Call",
    "CallFailed",
    "CallPiece",
    "Choice",
    "Client",
    "Message",
    "Model",
    "Options",
    "Origin",
    "Piece",
    "PromptToken",
    "Reason",
    "Replica",
    "Round",
    "ServerInfo",
    "Speculation",
    "Token",
    "Tool",
    "Tree",
    "Usage",
    "Wish",
]
