"""The socket for lanes: Rounds streams of drafters, and commits to gateways, of this machine.

Knows tokens and connections; knows no message and no session.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from graft.common import log
from graft.common.channel import VERIFY_MESSAGE_BYTES
from graft.common.errors import ProtocolBroken
from graft.common.lane import Lane
from graft.v1 import verify_pb2

_log = log.get("lanes")

_TOKEN_BYTES = 16
_NAMED_S = 5.0

Arrived = Callable[[Lane], None]
"""Called once the other end has come; sets the lane's `on_message`, or raises a GraftError."""


class Lanes:
    """Listens in a folder that only this user can enter; `close` removes it."""

    def __init__(self) -> None:
        self._port = 0
        self._folder: Path | None = None
        self._server: asyncio.Server | None = None
        self._expected: dict[bytes, Arrived] = {}
        self._unnamed: set[Lane] = set()

    async def open(self, port: int) -> None:
        """Begins to listen; without Unix sockets or a folder for one, there are no lanes.

        port: where the replica's gRPC listens.
        """
        self._port = port
        loop = asyncio.get_running_loop()
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="graft-"))
            self._server = await loop.create_unix_server(self._newcomer, self._folder / "lane")
        except (OSError, AttributeError, NotImplementedError) as error:
            _log.info("no lanes", reason=str(error))
        finally:
            if self._server is None:
                self.close()

    def close(self) -> None:
        """Takes no more lanes; those that carry a stream stay open."""
        for lane in [*self._unnamed]:
            lane.close()
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def offer(self, arrived: Arrived) -> verify_pb2.Lane | None:
        """What to tell a peer whose lane `arrived` is to have; None without lanes."""
        if self._server is None or self._folder is None:
            return None
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._expected[token] = arrived
        return verify_pb2.Lane(path=str(self._folder / "lane"), token=token, port=self._port)

    def withdraw(self, offer: verify_pb2.Lane | None) -> None:
        """Forgets an offer; a lane that took it stays."""
        if offer is not None:
            self._expected.pop(offer.token, None)

    def _newcomer(self) -> Lane:
        lane = Lane(lambda token: self._named(lane, token), VERIFY_MESSAGE_BYTES)
        self._unnamed.add(lane)
        lane.lost.add_done_callback(lambda _: self._unnamed.discard(lane))
        asyncio.get_running_loop().call_later(_NAMED_S, self._cut_unnamed, lane)
        return lane

    def _named(self, lane: Lane, token: bytes) -> None:
        for known in self._expected:
            if hmac.compare_digest(known, token):
                self._unnamed.discard(lane)
                self._expected.pop(known)(lane)
                return
        raise ProtocolBroken("nobody was offered a lane by this token")

    def _cut_unnamed(self, lane: Lane) -> None:
        if lane in self._unnamed:
            lane.close(ProtocolBroken("a lane was opened and no token came"))
