"""Takes up a replica's offer of a lane: whether it fits, and the socket behind it.

Knows the offer and addresses; knows no stream and no session.
"""

from __future__ import annotations

import asyncio

from graft.common import log
from graft.common.channel import is_loopback
from graft.common.errors import NoReplica
from graft.common.lane import Lane
from graft.v1 import verify_pb2

_log = log.get("lanes")
_CONNECT_S = 1.0


def fits(offer: verify_pb2.Lane, address: str) -> bool:
    """Whether who dialled `address` may take the offer.

    Another port than the replica's own is a relay's, and a lane would pass it by.
    """
    return is_loopback(address) and address.rpartition(":")[2] == str(offer.port)


async def connect(lane: Lane, offer: verify_pb2.Lane) -> bool:
    """Opens the lane; False, and it is closed, where its socket cannot be reached from here.

    The token was not sent then, so the other end goes on without a lane.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_CONNECT_S):
            await loop.create_unix_connection(lambda: lane, offer.path)
        lane.put(offer.token)
    except (OSError, TimeoutError, NotImplementedError, NoReplica) as error:
        _log.info("no lane", path=offer.path, reason=str(error))
        lane.close()
        return False
    return True
