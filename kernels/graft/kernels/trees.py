"""Values that tree building and verification pass around. Knows shapes; computes nothing.

Two layouts meet here. The padded layout of the field has one row a request and N nodes in each;
its names (retrive_index, retrive_next_token, predicts, ...) are the field's. The ragged layout is
`graft.kernels.ops.TreeRows`, which a step of the verify service uses.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

MAX_PACKED_NODES = 32


class MaskMode(IntEnum):
    """How `build_tree` writes ancestor-or-self visibility."""

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


class LevelInfo(NamedTuple):
    """Candidates of one level of growth: K = topk beams, with C candidates each.

    scores: [batch, 1, C] for level 1, then [batch, K, C], float32, products of probabilities.
    tokens: [batch, C], then [batch, K * C], int64.
    parents: [batch, K + 1], then [batch, K], int64: -1 is the root, otherwise the flat number of
        the candidate that became the beam.
    """

    scores: Tensor
    tokens: Tensor
    parents: Tensor


class SelectedBeams(NamedTuple):
    """The beams that go on after one level.

    input_ids: [batch * K], int64. hidden_states: [batch * K, hidden], the row of each beam's
    parent. scores: [batch, K]. info: what `organize_draft_results` needs of the level.
    """

    input_ids: Tensor
    hidden_states: Tensor
    scores: Tensor
    info: LevelInfo


class DraftResults(NamedTuple):
    """The nodes picked from all levels, in level-major order.

    parent_list: [batch, K * (S - 1) + 1], or [batch, 0] for one level. top_scores_index,
    draft_tokens: [batch, N - 1]. All int64.
    """

    parent_list: Tensor
    top_scores_index: Tensor
    draft_tokens: Tensor


class Links(NamedTuple):
    """The shape of padded trees; all [batch, N], int64; -1 is none.

    parent is the parent node, depth the number of edges to the root.
    """

    parent: Tensor
    depth: Tensor
    retrive_next_token: Tensor
    retrive_next_sibling: Tensor


class BuiltTrees(NamedTuple):
    """What a target forward needs of padded trees.

    draft_tokens: [batch * N], int64, the bonus token first in each tree.
    positions: [batch * N], int64, sequence length + depth.
    retrive_index: [batch, N], int64, row of each node in the flat batch.
    retrive_next_token, retrive_next_sibling: [batch, N], int64, local; -1 is none.
    tree_mask: flat, by `MaskMode`.
    """

    draft_tokens: Tensor
    positions: Tensor
    retrive_index: Tensor
    retrive_next_token: Tensor
    retrive_next_sibling: Tensor
    tree_mask: Tensor


class VerifyTrees(NamedTuple):
    """Padded trees as a verify kernel reads them; all [batch, N], int64."""

    candidates: Tensor
    retrive_index: Tensor
    retrive_next_token: Tensor
    retrive_next_sibling: Tensor


class VerifyResult(NamedTuple):
    """What verification decided; all int32.

    predicts: [batch * N], the token that follows each visited node, -1 at the others.
    accept_index: [batch, width], flat rows of the accepted path from the root on, -1 after its end.
    accept_token_num: [batch], accepted drafted tokens, the bonus not included.
    """

    predicts: Tensor
    accept_index: Tensor
    accept_token_num: Tensor


class ChainResult(NamedTuple):
    """What chain verification decided; all int32.

    tokens: [batch, S + 1], accepted drafts and then the bonus, -1 after it.
    accept_token_num: [batch], accepted drafted tokens, the bonus not included.
    """

    tokens: Tensor
    accept_token_num: Tensor


class UnoTrees(NamedTuple):
    """Trees grown best-first from per-depth candidates.

    draft_tokens, top_scores_index: [batch, Q - 1], int64, in order of selection.
    parent_list: [batch, Q - 1], int64: the slot of each node, -1 for the root.
    masses: [batch, Q - 1], float32, probability of each node's path.
    parent: [batch, Q], int64, parent node, -1 for the root.
    """

    draft_tokens: Tensor
    top_scores_index: Tensor
    parent_list: Tensor
    masses: Tensor
    parent: Tensor
