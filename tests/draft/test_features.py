"""Hidden states from a replica that the test plays: order, gaps, tiers, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from graft.common.errors import InvalidArgument, Mismatch, NumericFailure
from graft.common.feature_codec import encode
from graft.common.features import spec_from_proto
from graft.common.prefix import Prefix
from graft.common.sampling import Sampling
from graft.common.tier import Tier, tier_to_proto
from graft.common.tree import FloatArray, Tree, TreeLimits
from graft.draft.asking import asking
from graft.draft.features import FeatureChunk, FeatureNeed, FeatureStore
from graft.draft.mirror import ChainBroken, Mirror
from graft.draft.pairing import agree_features, hello_of
from graft.draft.proposers.base import ProposerInfo, Seat, chain
from graft.draft.proposers.ngram import NgramOptions, NgramProposer
from graft.draft.settings import DraftSettings
from graft.testing.drafting import drafting
from graft.testing.fake_verify import FakeRounds, FakeSession, welcome
from graft.v1.draft_pb2 import SetTier
from graft.v1.features_pb2 import (
    FeatureCodec,
    FeatureOffer,
    FeatureProjection,
    FeatureRows,
    SessionFeatures,
)
from graft.v1.verify_pb2 import SessionCommit, VerifyServiceDescribeResponse

BF16 = FeatureCodec.FEATURE_CODEC_BF16
INT8 = FeatureCodec.FEATURE_CODEC_INT8
NEED = FeatureNeed((1, 3), final_norm=False)
TIER = Tier("reader", 2, 1, 3)
WIDTH = 8


def offering(**changes: object) -> VerifyServiceDescribeResponse:
    """What a replica says that sends the states of a tiny target."""
    offer = FeatureOffer(
        codecs=[BF16, INT8],
        projections=[FeatureProjection(fused_id="abc", layers=[1, 3], width=5)],
    )
    fields = {"hidden_size": 4, "layer_count": 6, "features": offer, **changes}
    return welcome(**fields)


def row(position: int) -> FloatArray:
    return np.full((1, WIDTH), position, np.float32)


def rows(start: int, stop: int) -> FeatureRows:
    """Rows that say their position."""
    values = np.concatenate([row(position) for position in range(start, stop)])
    return FeatureRows(
        start_position=start, row_count=stop - start, payload=encode(values, BF16).tobytes()
    )


def chunk(start: int, stop: int) -> FeatureChunk:
    return FeatureChunk(start, stop - start, rows(start, stop).payload)


@dataclass(slots=True)
class Reader:
    """Repeats the root; keeps what it saw of the features at every proposal."""

    need: FeatureNeed | None = NEED
    name: str = "reader"
    seen: list[tuple[int, int, int]] = field(default_factory=list)

    def describe(self) -> ProposerInfo:
        return ProposerInfo(Tier(self.name, 2, 1, 3), needs=self.need)

    def open(self, mirror: Mirror) -> object:
        return None

    def propose(self, batch: Sequence[Seat]) -> Sequence[Tree | None]:
        for seat in batch:
            store = seat.mirror.features
            assert store is not None
            positions = np.arange(store.start, store.length)[:, None]
            assert (store.rows(store.start, store.length) == positions).all()
            self.seen.append((store.start, store.length, len(seat.mirror.prefix)))
        return [chain(seat, [seat.mirror.prefix.root] * 2) for seat in batch]

    def commit(self, seat: Seat, tokens: Sequence[int]) -> None: ...

    def close(self, seat: Seat) -> None: ...


def send(rounds: FakeRounds, session_id: int, start: int, stop: int) -> None:
    rounds.send(features=[SessionFeatures(session_id=session_id, rows=rows(start, stop))])


def row_before_root(session: FakeSession) -> FeatureRows:
    """What comes with a commit of one token."""
    return rows(len(session.prefix) - 1, len(session.prefix))


def commit(session: FakeSession, *tokens: int, features: FeatureRows | None = None) -> None:
    session.prefix.extend(tokens)
    session.rounds.send(
        commits=[
            SessionCommit(
                session_id=session.session_id,
                tokens=tokens,
                prefix_length=len(session.prefix),
                prefix_digest=session.prefix.digest,
                features=features,
            )
        ]
    )


async def test_hello_and_join_say_what_the_proposer_reads() -> None:
    async with drafting([Reader()], feature_codec="int8", feature_window=30) as it:
        it.replica.verify.greeting = lambda rounds: rounds.send(welcome=offering())
        await it.gateway.attend(it.replica.address, 5, TIER)
        rounds = await it.replica.verify.stream()
        spec = replace(NEED, codec=INT8).spec
        assert [spec_from_proto(message) for message in rounds.hello.features] == [spec]
        join = await rounds.next("joins")
        assert spec_from_proto(join.features) == spec
        assert join.feature_window_tokens == 30


async def test_nothing_is_proposed_before_the_row_before_the_root_is_there() -> None:
    reader = Reader()
    async with drafting([reader]) as it:
        it.replica.verify.greeting = lambda rounds: rounds.send(welcome=offering())
        await it.gateway.attend(it.replica.address, 5, TIER)
        rounds = await it.replica.verify.stream()
        await rounds.next("joins")
        send(rounds, 5, 0, 3)
        session = rounds.prefix(5, [9, 8, 7, 6, 5, 4])
        assert (await rounds.next("empties")).prefix_length == 6
        send(rounds, 5, 3, 5)
        assert (await rounds.next("trees")).prefix_length == 6
        commit(session, 1, 2, features=rows(5, 7))
        assert (await rounds.next("trees")).prefix_length == 8
        commit(session, 3)
        assert (await rounds.next("empties")).prefix_length == 9
        send(rounds, 5, 7, 8)
        assert (await rounds.next("trees")).prefix_length == 9
        assert reader.seen == [(0, 5, 6), (0, 7, 8), (0, 8, 9)]
        assert it.value("feature_rows_total") == 8
        assert it.value("feature_bytes_total") == 8 * 2 * WIDTH


async def test_rows_that_came_before_the_prefix_are_there_at_once() -> None:
    reader = Reader()
    async with drafting([reader]) as it:
        it.replica.verify.greeting = lambda rounds: rounds.send(welcome=offering())
        await it.gateway.attend(it.replica.address, 5, TIER)
        rounds = await it.replica.verify.stream()
        await rounds.next("joins")
        send(rounds, 5, 7, 9)  # of a join that was taken back
        send(rounds, 5, 2, 4)
        send(rounds, 5, 4, 5)
        rounds.prefix(5, [9, 8, 7, 6, 5, 4])
        await rounds.next("trees")
        assert reader.seen == [(2, 5, 6)]
        assert not any(kind == "empties" for kind, _ in rounds.pending())


@pytest.mark.parametrize(
    "broken",
    [
        rows(6, 8),
        rows(4, 6),
        rows(5, 9),
        FeatureRows(start_position=5, row_count=2, payload=bytes(3)),
        FeatureRows(start_position=5, row_count=2, payload=b"\xff" * 32),
    ],
    ids=["gap", "overlap", "beyond the root", "size", "nan"],
)
async def test_rows_that_do_not_follow_end_the_join_and_begin_another(broken: FeatureRows) -> None:
    reader = Reader()
    async with drafting([reader]) as it:
        it.replica.verify.greeting = lambda rounds: rounds.send(welcome=offering())
        await it.gateway.attend(it.replica.address, 5, TIER)
        rounds = await it.replica.verify.stream()
        await rounds.next("joins")
        send(rounds, 5, 0, 5)
        session = rounds.prefix(5, [9, 8, 7, 6, 5, 4])
        await rounds.next("trees")
        commit(session, 1, 2, features=broken)
        assert (await rounds.next("leaves")).session_id == 5
        join = await rounds.next("joins")
        assert join.session_id == 5 and join.HasField("features")
        send(rounds, 5, 4, 7)
        rounds.prefix(5, session.prefix.tokens.tolist())
        assert (await rounds.next("trees")).prefix_length == 8
        assert reader.seen[-1] == (4, 7, 8)
        assert it.value("rejoins_total") == 1


async def test_a_tier_that_reads_states_joins_anew_and_one_that_does_not_keeps_them() -> None:
    reader, ngram = Reader(), NgramProposer(NgramOptions())
    async with drafting([ngram, reader]) as it:
        it.replica.verify.greeting = lambda rounds: rounds.send(welcome=offering())
        await it.gateway.attend(it.replica.address, 5, Tier("ngram", 2, 1, 3))
        rounds = await it.replica.verify.stream()
        assert not (await rounds.next("joins")).HasField("features")
        rounds.prefix(5, [9, 8, 9, 8])
        await rounds.next("trees")

        async def tier(name: str) -> None:
            message = tier_to_proto(Tier(name, 2, 1, 3))
            await it.gateway.send(set_tier=SetTier(session_id=5, tier=message))

        await tier("reader")
        await rounds.next("leaves")
        assert (await rounds.next("joins")).HasField("features")
        send(rounds, 5, 0, 3)
        session = rounds.prefix(5, [9, 8, 9, 8])
        await rounds.next("trees")
        for name in ("ngram", "reader"):
            await tier(name)
            for token in (9, 8, 9, 8):
                commit(session, token, features=row_before_root(session))
                await rounds.next("trees")
        assert [kind for kind, _ in rounds.pending()] == []
        assert reader.seen[-1] == (0, 11, 12)


async def test_a_replica_without_states_is_refused_with_a_sentence() -> None:
    async with drafting([Reader()]) as it:
        await it.gateway.attend(it.replica.address, 5, TIER)
        refused = await it.gateway.next("refused")
        assert refused.reason == Mismatch.reason
        assert "hidden states" in refused.detail


def test_what_verify_lacks_is_named() -> None:
    assert agree_features(NEED, offering()).width == 8
    assert agree_features(replace(NEED, fused=True, fused_id="abc"), offering()).width == 5
    with pytest.raises(Mismatch, match="hidden state 7"):
        agree_features(FeatureNeed((7,)), offering())
    with pytest.raises(Mismatch, match="projection xyz is not at verify, which has abc"):
        agree_features(replace(NEED, fused=True, fused_id="xyz"), offering())
    with pytest.raises(Mismatch, match="FEATURE_CODEC_INT8"):
        agree_features(replace(NEED, codec=INT8), offering(features=FeatureOffer(codecs=[BF16])))


def test_a_projection_is_asked_for_where_there_is_one() -> None:
    infos = {"reader": Reader(replace(NEED, fused_id="abc")).describe()}
    settings = DraftSettings.load(None, {"feature_fused": True})
    asked = asking(infos, settings)["reader"].needs
    assert asked is not None and asked.spec.fused_id == "abc"
    assert hello_of(asking(infos, settings).values(), 1).features[0].fused_id == "abc"
    plain = asking(infos, DraftSettings.load(None, {}))["reader"].needs
    assert plain is not None and plain.spec.fused_id == ""
    with pytest.raises(InvalidArgument, match="none of reader has a projection"):
        asking({"reader": Reader().describe()}, settings)


def new_mirror(length: int, store: FeatureStore | None) -> Mirror:
    prefix = Prefix(range(length))
    limits = TreeLimits(16, 8, 320)
    return Mirror(1, prefix, 1, Sampling(), limits, 100, features=store)


def test_a_mirror_takes_rows_of_committed_tokens_only() -> None:
    mirror = new_mirror(6, FeatureStore(WIDTH))
    assert not mirror.features_complete
    mirror.take_features([chunk(1, 3), chunk(3, 5)])
    assert mirror.features_complete
    with pytest.raises(ChainBroken, match="up to position 5"):
        mirror.take_features([chunk(5, 6)])
    with pytest.raises(ChainBroken, match="nobody asked"):
        new_mirror(3, None).take_features([chunk(0, 1)])


def test_a_store_starts_where_its_first_rows_do_and_refuses_nonsense() -> None:
    store = FeatureStore(WIDTH)
    store.take(chunk(4, 6))
    assert (store.start, store.length) == (4, 6)
    with pytest.raises(InvalidArgument, match="position 7 came, expected 6"):
        store.take(chunk(7, 8))
    with pytest.raises(NumericFailure):
        store.take(FeatureChunk(6, 1, b"\xff" * 16))
    store.forget(6)
    with pytest.raises(InvalidArgument):
        store.take(chunk(0, 1))
    store.take(chunk(6, 7))
    assert store.rows(6, 7).tolist() == row(6).tolist()
