"""The wire form of a tree that grows from a mirror's prefix. Checks nothing."""

from __future__ import annotations

from graft.common.draft_probs import Distribution, encode_probs
from graft.common.tree import Tree
from graft.common.tree_codec import encode_scores, encode_shape, encode_tokens
from graft.draft.mirror import Mirror
from graft.v1.tree_pb2 import CandidateTree


def candidate(
    tree: Tree, mirror: Mirror, draft_s: float = 0.0, probs: tuple[Distribution, ...] = ()
) -> CandidateTree:
    """`tree` as a message that names the mirror's prefix; it took `draft_s` seconds to grow.

    probs: what its tokens were drawn from; without them it says so to sessions that must know.
    """
    asked = mirror.sampling.needs_draft_probs
    vocab_size = mirror.limits.vocab_size
    return CandidateTree(
        session_id=mirror.session_id,
        prefix_length=len(mirror.prefix),
        prefix_digest=mirror.prefix.digest,
        shape=encode_shape(tree),
        tokens=encode_tokens(tree, vocab_size),
        scores=encode_scores(tree),
        draft_micros=int(draft_s * 1e6),
        one_hot=asked and not probs,
        probs=encode_probs(probs, vocab_size) if asked else (),
    )
