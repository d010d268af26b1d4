"""Whether a draft service and a verify replica fit each other, said in a sentence. No I/O."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from graft.common.channel import PROTOCOL_REVISION
from graft.common.errors import InvalidArgument, Mismatch
from graft.common.features import spec_to_proto
from graft.common.tier import Tier
from graft.common.tree import HARD_MAX_NODES, TreeLimits
from graft.draft.features import FeatureNeed, FeatureTerms
from graft.draft.proposers.base import ProposerInfo
from graft.v1.features_pb2 import FeatureCodec
from graft.v1.verify_pb2 import DraftHello, VerifyServiceDescribeResponse


def hello_of(infos: Collection[ProposerInfo], incarnation_id: int) -> DraftHello:
    """What this service says of itself: the vocabulary its proposers were built for, if any.

    Raises:
        InvalidArgument: two proposers were built for different vocabularies.
    """
    vocabularies = {
        (info.vocab_size, info.tokenizer_digest)
        for info in infos
        if info.vocab_size or info.tokenizer_digest
    }
    if len(vocabularies) > 1:
        sizes = " and ".join(sorted(f"{size} ({digest[:12]})" for size, digest in vocabularies))
        raise InvalidArgument(
            f"proposers were built for different vocabularies: {sizes}", field="proposers"
        )
    vocab_size, digest = vocabularies.pop() if vocabularies else (0, "")
    return DraftHello(
        protocol_revision=PROTOCOL_REVISION,
        incarnation_id=incarnation_id,
        vocab_size=vocab_size,
        tokenizer_digest=digest,
        features=[spec_to_proto(info.needs.spec) for info in infos if info.needs is not None],
    )


def agree(hello: DraftHello, welcome: VerifyServiceDescribeResponse) -> TreeLimits:
    """What a tree may hold between these two.

    Sizes that differ by padding alone are fine: equal tokenizers decide.

    Raises:
        Mismatch: they do not fit; the message says what differs.
    """
    if welcome.protocol_revision != hello.protocol_revision:
        raise Mismatch(
            f"verify speaks protocol revision {welcome.protocol_revision}, "
            f"draft speaks {hello.protocol_revision}"
        )
    ours, theirs = hello.tokenizer_digest, welcome.tokenizer_digest
    if ours and theirs and ours != theirs:
        raise Mismatch(
            f"the drafter's tokenizer {ours[:12]} is not the target's {theirs[:12]} "
            f"({welcome.model_id})"
        )
    same_tokenizer = bool(ours and theirs)
    if hello.vocab_size and hello.vocab_size != welcome.vocab_size and not same_tokenizer:
        raise Mismatch(
            f"the drafter's vocabulary has {hello.vocab_size} tokens, the target's "
            f"{welcome.vocab_size} ({welcome.model_id})"
        )
    if welcome.vocab_size == 0 or welcome.max_trees == 0 or welcome.max_nodes == 0:
        raise Mismatch(
            "verify named no limits: "
            f"vocab_size {welcome.vocab_size}, max_trees {welcome.max_trees}, "
            f"max_nodes {welcome.max_nodes}"
        )
    return TreeLimits(
        max_nodes=min(welcome.max_nodes, HARD_MAX_NODES),
        max_depth=min(welcome.max_depth, HARD_MAX_NODES - 1),
        vocab_size=welcome.vocab_size,
    )


def agree_features(need: FeatureNeed, welcome: VerifyServiceDescribeResponse) -> FeatureTerms:
    """What to ask for in a join, so that a proposer gets the hidden states it needs.

    Raises:
        Mismatch: verify does not send them; the message says what differs.
    """
    spec, offer = need.spec, welcome.features
    if spec.codec not in offer.codecs:
        raise Mismatch(
            f"the proposer works from hidden states, and {welcome.model_id} at verify does not "
            f"send them by codec {FeatureCodec.Name(spec.codec)}"
        )
    if max(spec.layers) > welcome.layer_count:
        raise Mismatch(
            f"the proposer works from hidden state {max(spec.layers)}, {welcome.model_id} has "
            f"0 to {welcome.layer_count}"
        )
    fused_width = 0
    if need.fused:
        known = {one.fused_id: one for one in offer.projections}
        if spec.fused_id not in known:
            here = ", ".join(known) or "none"
            raise Mismatch(
                f"the proposer's projection {spec.fused_id or '(without id)'} is not at verify, "
                f"which has {here}; give verify its file by --fused-features"
            )
        fused_width = known[spec.fused_id].width
    return FeatureTerms(spec, spec.width(welcome.hidden_size, fused_width), need.window_tokens)


def tier_in_force(tier: Tier, info: ProposerInfo, limits: TreeLimits, max_trees: int = 1) -> Tier:
    """The tier cut to what proposer and verify can do.

    Look-ahead takes no more than verify holds beside the tree of the committed prefix, and nothing
    where the proposer cannot work from likely prefixes.
    """
    agreed = tier.within(
        min(limits.max_nodes, info.max_nodes), min(limits.max_depth, info.max_depth)
    )
    room = max(0, max_trees - 1) if info.foresees else 0
    return replace(agreed, lookahead=min(agreed.lookahead, room))
