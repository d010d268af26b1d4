"""The API keys of the server. Knows no transport."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from graft.common.errors import Unauthenticated


class Keys:
    """The API keys of the server; none means that everybody may ask."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def tenant(self, authorization: bytes | None) -> str:
        """A short digest of the caller's key, empty when keys are not asked for.

        Every key is compared, in constant time.

        Raises:
            Unauthenticated: the key is missing or wrong.
        """
        if not self._keys:
            return ""
        scheme, _, key = (authorization or b"").partition(b" ")
        given = key.strip() if scheme.lower() == b"bearer" else b""
        found = False
        for known in self._keys:
            found |= hmac.compare_digest(known, given)
        if not found:
            what = "is wrong" if given else "is missing; send it as Authorization: Bearer KEY"
            raise Unauthenticated(f"the API key {what}")
        return hashlib.sha256(given).hexdigest()[:16]
