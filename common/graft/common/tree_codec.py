"""Trees on the wire: two bits a node and packed tokens. Knows bytes; knows no session.

Bit 2i of the shape is "node i has a child", bit 2i + 1 is "node i has a next sibling", lowest bit
of the first byte first. In preorder these two bits are the whole shape: cycles, orphans and second
roots cannot be written down.
"""

from __future__ import annotations

import struct

import numpy as np

from graft.common.tree import (
    HARD_MAX_NODES,
    FloatArray,
    IntArray,
    Tree,
    TreeLimits,
    TreeRefused,
    check,
)
from graft.v1.tree_pb2 import TreeRefusal


def token_width(vocab_size: int) -> int:
    """Bytes a token takes on the wire: 2, 3 or 4."""
    if vocab_size <= 1 << 16:
        return 2
    return 3 if vocab_size <= 1 << 24 else 4


def encode_shape(tree: Tree) -> bytes:
    """The two bits of every node, ceil(num_nodes / 4) bytes."""
    bits = 0
    links = zip(tree.next_token.tolist(), tree.next_sibling.tolist(), strict=True)
    for node, (child, sibling) in enumerate(links):
        bits |= ((child >= 0) | (sibling >= 0) << 1) << 2 * node
    return bits.to_bytes((tree.num_nodes + 3) // 4, "little")


def encode_tokens(tree: Tree, vocab_size: int) -> bytes:
    """The drafted tokens without the root."""
    return pack_tokens(tree.tokens[1:], vocab_size)


def pack_tokens(tokens: IntArray, vocab_size: int) -> bytes:
    """Tokens, little endian, in as few bytes each as the vocabulary needs."""
    columns = tokens.astype("<u4").view(np.uint8).reshape(-1, 4)
    return columns[:, : token_width(vocab_size)].tobytes()


def encode_scores(tree: Tree) -> bytes:
    """The drafted nodes' scores as float16, or nothing when the tree has none."""
    return b"" if tree.scores is None else tree.scores[1:].astype("<f2").tobytes()


def decode(root: int, shape: bytes, tokens: bytes, scores: bytes, limits: TreeLimits) -> Tree:
    """A checked tree from wire bytes; `root` is the receiver's own last committed token.

    Raises:
        TreeRefused: with the typed reason; nothing else, whatever the bytes are.
    """
    width = token_width(limits.vocab_size)
    num_nodes = 1 + len(tokens) // width
    if len(tokens) % width:
        raise _malformed(f"token column has {len(tokens)} bytes, not a multiple of {width}")
    if num_nodes > min(limits.max_nodes, HARD_MAX_NODES):
        raise TreeRefused(
            TreeRefusal.TREE_REFUSAL_TOO_MANY_NODES,
            f"tree has {num_nodes} nodes, limit is {limits.max_nodes}",
        )
    if len(shape) != (num_nodes + 3) // 4:
        raise _malformed(f"shape has {len(shape)} bytes, expected {(num_nodes + 3) // 4}")
    places = range(0, len(tokens), width)
    drafted = [int.from_bytes(tokens[place : place + width], "little") for place in places]
    if drafted and max(drafted) >= limits.vocab_size:
        raise TreeRefused(
            TreeRefusal.TREE_REFUSAL_TOKEN_RANGE,
            f"a token is outside 0..{limits.vocab_size - 1}",
        )
    # One array for all five: calls of numpy are what this costs.
    lines = np.array(([root, *drafted], *_links(shape, num_nodes)), np.int32)
    tree = Tree(
        tokens=lines[0],
        next_token=lines[1],
        next_sibling=lines[2],
        parent=lines[3],
        depth=lines[4],
        scores=_decode_scores(scores, num_nodes),
    )
    check(tree, limits)
    return tree


def _links(shape: bytes, num_nodes: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """One stack pass over the shape bits; the stack holds nodes that wait for their sibling."""
    bits = int.from_bytes(shape, "little")
    if bits >> 2 * num_nodes:
        raise _malformed("bits past the last node are set")
    if bits >> 1 & 1:
        raise _malformed(f"next_sibling bit set on the root of a {num_nodes}-node tree")
    next_token, next_sibling = [-1] * num_nodes, [-1] * num_nodes
    parent, depth = [-1] * num_nodes, [0] * num_nodes
    waiting: list[int] = []
    for node in range(num_nodes):
        has_child = bits >> 2 * node & 1
        if bits >> 2 * node & 2:
            waiting.append(node)
        following = node + 1
        if following == num_nodes:
            if has_child or waiting:
                raise _malformed(f"shape of {num_nodes} nodes promises more nodes")
        elif has_child:
            next_token[node] = following
            parent[following], depth[following] = node, depth[node] + 1
        elif waiting:
            elder = waiting.pop()
            next_sibling[elder] = following
            parent[following], depth[following] = parent[elder], depth[elder]
        else:
            raise _malformed(f"shape ends at node {node}, tokens at node {num_nodes - 1}")
    return next_token, next_sibling, parent, depth


def _decode_scores(scores: bytes, num_nodes: int) -> FloatArray | None:
    if not scores:
        return None
    if len(scores) != 2 * (num_nodes - 1):
        raise _malformed(f"scores have {len(scores)} bytes, expected {2 * (num_nodes - 1)}")
    values = (0.0, *struct.unpack(f"<{num_nodes - 1}e", scores))
    if not all(value <= 0 for value in values):
        raise TreeRefused(TreeRefusal.TREE_REFUSAL_BAD_SCORES, "a score is NaN or above zero")
    return np.array(values, np.float32)


def _malformed(message: str) -> TreeRefused:
    return TreeRefused(TreeRefusal.TREE_REFUSAL_MALFORMED, message)
