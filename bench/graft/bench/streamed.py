"""Plain decoding as a client of the gateway sees it: seconds a token of a stream it only reads.

The client is a blocking one in a thread of its own: it shares the cores with what it measures, so
it does next to nothing. Knows HTTP and the stream's end; reads no event but the last.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from graft.common.errors import GraftError
from graft.common.sampling import Sampling

_TIMEOUT_S = 600.0
_READ_BYTES = 1 << 16
_COUNT = re.compile(rb'"completion_tokens":(\d+)')


def seconds_a_token(
    url: str,
    model: str,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: Sampling,
    cache_salt: str,
) -> float:
    """Time from the first piece of an answer to its last, over the tokens between.

    Raises:
        GraftError: the gateway did not answer, or not with two tokens at least.
    """
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "speculation": "off",
        "cache_salt": cache_salt,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    arrivals: list[float] = []
    came = b""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise GraftError(f"the gateway answered {response.status}: {response.read(300)!r}")
        while piece := response.read1(_READ_BYTES):
            if b'"choices":[{' in piece:
                arrivals.append(time.perf_counter())
            came = came[-_READ_BYTES:] + piece
    except (OSError, http.client.HTTPException) as error:
        raise GraftError(f"{url} did not answer: {error!r}") from None
    finally:
        connection.close()
    counts = _COUNT.findall(came)
    if not counts or int(counts[-1]) < 2 or len(arrivals) < 2:
        raise GraftError("the stream ended without two tokens")
    return (arrivals[-1] - arrivals[0]) / (int(counts[-1]) - 1)
