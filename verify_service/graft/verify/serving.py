"""What a replica answers with once its model is there."""

from __future__ import annotations

from dataclasses import dataclass

from graft.common.tree import TreeLimits
from graft.v1 import verify_pb2
from graft.verify.door import Door
from graft.verify.engine import Engine
from graft.verify.grammar.grammars import Grammars
from graft.verify.incoming import Identity
from graft.verify.lanes import Lanes
from graft.verify.shelf import Room
from graft.verify.tally import Tally


@dataclass(frozen=True, slots=True, eq=False)
class Serving:
    """All of it; it stays the same while the replica lives."""

    engine: Engine
    door: Door
    limits: TreeLimits
    identity: Identity
    description: verify_pb2.VerifyServiceDescribeResponse
    max_trees: int
    tally: Tally
    room: Room
    lanes: Lanes
    grammars: Grammars | None = None
