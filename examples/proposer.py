"""A proposer of your own: it guesses that what followed the last two tokens before follows again.

Run it beside `graft verify` and `graft gateway --draft 127.0.0.1:7003`.
"""

import asyncio
from collections.abc import Sequence

from graft.common.server import wait_for_signal
from graft.common.tier import Tier
from graft.common.tree import Tree
from graft.draft.mirror import Mirror
from graft.draft.proposers.base import ProposerInfo, Seat, chain
from graft.draft.server import DraftServer
from graft.draft.settings import DraftSettings


class Lookup:
    name = "lookup"

    def describe(self) -> ProposerInfo:
        return ProposerInfo(Tier("lookup", num_steps=6, num_draft_tokens=7), detail="looks back")

    def open(self, mirror: Mirror) -> object:
        return None

    def propose(self, batch: Sequence[Seat]) -> Sequence[Tree | None]:
        return [self._guess(seat) for seat in batch]

    def commit(self, seat: Seat, tokens: Sequence[int]) -> None: ...

    def close(self, seat: Seat) -> None: ...

    def _guess(self, seat: Seat) -> Tree | None:
        tokens = seat.mirror.prefix.tokens.tolist()
        for place in range(len(tokens) - 1, 1, -1):
            if tokens[place - 2 : place] == tokens[-2:]:
                return chain(seat, tokens[place:])
        return None


async def main() -> None:
    server = DraftServer(DraftSettings.load(flags={"port": 7003}), proposers=[Lookup()])
    await server.start()
    await wait_for_signal()
    await server.stop(5.0)


if __name__ == "__main__":
    asyncio.run(main())
