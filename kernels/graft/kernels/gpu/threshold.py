"""The threshold of a filter in one row: the highest logit at which enough is kept.

Device functions only. A row is read a few times to narrow the threshold down; what is left then
fits a list, and the rest of the search runs in registers. The search goes over the ordered bit
patterns of the logits and every count and weight is an integer sum, so it ends at the bits of
graft.kernels.reference.choose.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graft.kernels.gpu import float_math

INFINITY = tl.constexpr(float("inf"))
LOWEST_KEY = tl.constexpr(-(2**31))
HIGHEST_KEY = tl.constexpr(2**31 - 1)
INFINITY_KEY = tl.constexpr(0x7F800000)


@triton.jit
def load_logits(logits_row, bitmask_row, lane, inside, HAS_BITMASK: tl.constexpr):
    """float32 logits, -inf where the mask forbids; NaN and +inf stay, so that they are seen."""
    x = tl.load(logits_row + lane, mask=inside, other=-INFINITY).to(tl.float32)
    if HAS_BITMASK:
        word = tl.load(bitmask_row + lane // 32, mask=inside, other=-1)
        allowed = ((word >> (lane % 32)) & 1) != 0
        x = tl.where(allowed | ~(x < INFINITY), x, -INFINITY)
    return x


@triton.jit
def weights_of(x, heat, top, floor, least_share):
    """int64 weights of exp(z - top); 0 without support, below floor and below least_share."""
    z = tl.div_rn(x, heat)
    counted = (x > -INFINITY) & (z >= floor)
    share = float_math.exp32(tl.where(counted, z - top, -INFINITY))
    return float_math.to_weights(tl.where(share >= least_share, share, 0.0))


@triton.jit
def z_of(key, heat):
    """The logit of an order key over the temperature."""
    return tl.div_rn(float_math.from_order_key(key.to(tl.int32)), heat)


@triton.jit
def share_of(total, mass):
    """The weight that is `mass` of a total: rounded up, at least 1."""
    share = tl.ceil(mass.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(share, total), 1)


@triton.jit
def _middle(low, high, part, by_value):
    """A key between two keys, a quarter `part` of the way, by value or by bit pattern."""
    way = low + (high - low) * part // 4
    below = float_math.from_order_key(tl.maximum(low, -INFINITY_KEY).to(tl.int32))
    above = float_math.from_order_key(tl.minimum(high, INFINITY_KEY).to(tl.int32))
    value = below + (above - below) * (part * 0.25)
    near = float_math.order_key(value).to(tl.int64)
    usable = by_value & (value == value) & (near > low) & (near < high)
    return tl.where(usable, near, way)


@triton.jit
def _narrow(
    logits_row, bitmask_row, vocab, low, high, held, limit, wanted, mass, heat, top, floor,
    WEIGH: tl.constexpr, HAS_BITMASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys around the threshold, close enough that at most `limit` tokens are at or above low.

    Measured is the number of tokens, which has to reach `wanted`, or with WEIGH the weight of
    those at or above floor, which has to reach `mass` of their total. The measure at low does,
    the one at high does not. Each pass tries three keys between and pulls both ends in to keys
    that tokens have; it alternates between even values and even bit patterns, so it ends. held is
    the number of tokens at or above low, or more.
    """
    passes = low * 0
    while (high - low > 1) & ((held > limit) | (wanted < 0)):
        by_value = passes % 2 == 0
        p1 = _middle(low, high, 1, by_value)
        p2 = _middle(low, high, 2, by_value)
        p3 = _middle(low, high, 3, by_value)
        m0 = tl.zeros([BLOCK], tl.int64)
        m1 = tl.zeros([BLOCK], tl.int64)
        m2 = tl.zeros([BLOCK], tl.int64)
        m3 = tl.zeros([BLOCK], tl.int64)
        c1 = tl.zeros([BLOCK], tl.int32)
        c2 = tl.zeros([BLOCK], tl.int32)
        c3 = tl.zeros([BLOCK], tl.int32)
        least = tl.full([BLOCK], HIGHEST_KEY, tl.int32)
        most = tl.full([BLOCK], LOWEST_KEY, tl.int32)
        k0 = low.to(tl.int32)
        k1 = p1.to(tl.int32)
        k2 = p2.to(tl.int32)
        k3 = p3.to(tl.int32)
        k4 = high.to(tl.int32)
        for first in range(0, vocab, BLOCK):
            lane = first + tl.arange(0, BLOCK)
            x = load_logits(logits_row, bitmask_row, lane, lane < vocab, HAS_BITMASK)
            key = float_math.order_key(x)
            live = x > -INFINITY
            c1 += (live & (key >= k1)).to(tl.int32)
            c2 += (live & (key >= k2)).to(tl.int32)
            c3 += (live & (key >= k3)).to(tl.int32)
            if WEIGH:
                weight = weights_of(x, heat, top, floor, 0.0)
                m0 += weight
                m1 += tl.where(key >= k1, weight, 0)
                m2 += tl.where(key >= k2, weight, 0)
                m3 += tl.where(key >= k3, weight, 0)
            least = tl.minimum(least, tl.where(live & (key >= k0), key, HIGHEST_KEY))
            most = tl.maximum(most, tl.where(live & (key < k4), key, LOWEST_KEY))
        n1 = tl.sum(c1, 0)
        n2 = tl.sum(c2, 0)
        n3 = tl.sum(c3, 0)
        s1 = n1.to(tl.int64)
        s2 = n2.to(tl.int64)
        s3 = n3.to(tl.int64)
        if WEIGH:
            wanted = share_of(tl.sum(m0, 0), mass)
            s1 = tl.sum(m1, 0)
            s2 = tl.sum(m2, 0)
            s3 = tl.sum(m3, 0)
        low = tl.maximum(low, tl.min(least, 0).to(tl.int64))
        high = tl.minimum(high, tl.max(most, 0).to(tl.int64) + 1)
        held = tl.where((s1 >= wanted) & (p1 >= low), n1, held)
        low = tl.where(s1 >= wanted, tl.maximum(low, p1), low)
        held = tl.where((s2 >= wanted) & (p2 >= low), n2, held)
        low = tl.where(s2 >= wanted, tl.maximum(low, p2), low)
        held = tl.where((s3 >= wanted) & (p3 >= low), n3, held)
        low = tl.where(s3 >= wanted, tl.maximum(low, p3), low)
        high = tl.where(s3 < wanted, tl.minimum(high, p3), high)
        high = tl.where(s2 < wanted, tl.minimum(high, p2), high)
        high = tl.where(s1 < wanted, tl.minimum(high, p1), high)
        passes += 1
    return low, high, wanted, held


@triton.jit
def _first_key(key, heat):
    """The lowest key that has the z of `key`: a division can make neighbours equal."""
    z = z_of(key, heat)
    below = key * 0 + LOWEST_KEY
    while key - below > 1:
        middle = below + (key - below) // 2
        if z_of(middle, heat) >= z:
            key = middle
        else:
            below = middle
    return key.to(tl.int32)


@triton.jit
def _list(
    logits_row, bitmask_row, listed, vocab, least_key,
    HAS_BITMASK: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes keys and, LISTED further on, tokens from least_key up; returns their number.

    In order of token; of more than LISTED only the first are written.
    """
    count = tl.full([], 0, tl.int32)
    for first in range(0, vocab, BLOCK):
        lane = first + tl.arange(0, BLOCK)
        x = load_logits(logits_row, bitmask_row, lane, lane < vocab, HAS_BITMASK)
        key = float_math.order_key(x)
        hit = ((x > -INFINITY) & (key >= least_key)).to(tl.int32)
        hits = tl.sum(hit, 0)
        if hits > 0:
            place = count + tl.cumsum(hit, 0) - 1
            written = (hit > 0) & (place < LISTED)
            tl.store(listed + place, key, mask=written)
            tl.store(listed + LISTED + place, lane, mask=written)
            count += hits
    tl.debug_barrier()
    return count


@triton.jit
def settle(
    listed, count, low, high, wanted, mass, heat, top, floor,
    WEIGH: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """The threshold itself, from a list of all tokens at or above low; `wanted` as in _narrow.

    With WEIGH and wanted below 0, `mass` is taken of the weight of the list.
    """
    slot = tl.arange(0, LISTED)
    key = tl.load(listed + slot, mask=slot < count, other=LOWEST_KEY)
    measure = (slot < count).to(tl.int64)
    if WEIGH:
        weight = weights_of(float_math.from_order_key(key), heat, top, floor, 0.0)
        measure = tl.where(slot < count, weight, 0)
        if wanted < 0:
            wanted = share_of(tl.sum(measure, 0), mass)
    while high - low > 1:
        middle = low + (high - low) // 2
        if tl.sum(tl.where(key >= middle, measure, 0), 0) >= wanted:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def search(
    logits_row, bitmask_row, listed, vocab, low, high, held, wanted, mass, heat, top, floor,
    WEIGH: tl.constexpr, HAS_BITMASK: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The highest key at which tokens measure enough, and how many tokens the list then has.

    The list holds all tokens whose z is at least that of the threshold; 0 when there is no list.
    """
    low, high, wanted, held = _narrow(
        logits_row, bitmask_row, vocab, low, high, held, LISTED // 2, wanted, mass, heat, top,
        floor, WEIGH, HAS_BITMASK, BLOCK,
    )  # fmt: skip
    count = tl.full([], 0, tl.int32)
    if high - low > 1:
        count = _list(
            logits_row, bitmask_row, listed, vocab, _first_key(low, heat),
            HAS_BITMASK, LISTED, BLOCK,
        )  # fmt: skip
        if count <= LISTED:
            low = settle(
                listed, count, low, high, wanted, mass, heat, top, floor, WEIGH, LISTED
            )  # fmt: skip
        else:
            # A temperature so high that thousands of logits share one z.
            count = tl.full([], 0, tl.int32)
            low, high, wanted, held = _narrow(
                logits_row, bitmask_row, vocab, low, high, held, 0, wanted, mass, heat, top,
                floor, WEIGH, HAS_BITMASK, BLOCK,
            )  # fmt: skip
    return low, count
