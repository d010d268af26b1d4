"""The links of a draft service, one for each verify address, made when they are first needed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from graft.common.errors import GraftError
from graft.draft.events import Outcome
from graft.draft.link import Link, Pairing
from graft.draft.roster import Office


class Links:
    """Finds the link of an address, and the link an outcome belongs to; on the loop's thread."""

    def __init__(self, pairing: Pairing, office: Office) -> None:
        self._pairing = pairing
        self._office = office
        self._links: dict[str, Link] = {}

    @property
    def num_sessions(self) -> int:
        """Sessions attended or being joined, over all links."""
        return sum(link.num_sessions for link in self._links.values())

    def to(self, address: str) -> Link:
        """The link to `address`; it connects by itself.

        Raises:
            InvalidArgument: plain text to another machine was not allowed.
        """
        self._links = {known: link for known, link in self._links.items() if not link.ended}
        if address not in self._links:
            self._links[address] = Link(address, self._pairing, self._office)
        return self._links[address]

    def deliver(self, outcomes: Sequence[Outcome]) -> None:
        """Hands outcomes to their links; those of forgotten sessions are dropped."""
        for outcome in outcomes:
            roster = self._office.routes.get(outcome.key)
            if roster is not None:
                roster.deliver(outcome)

    def refuse_all(self, error: GraftError) -> None:
        """Leaves every session of every link and says why."""
        for link in self._links.values():
            link.refuse_all(error)

    async def wait_empty(self, timeout_s: float) -> bool:
        """Waits until no session is attended; False when some still are after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.num_sessions:
                    self._office.emptied.clear()
                    await self._office.emptied.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Ends all links."""
        links, self._links = self._links, {}
        for link in links.values():
            await link.close()
