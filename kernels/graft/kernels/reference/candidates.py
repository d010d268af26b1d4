"""Level-by-level growth of candidates and the pick of the best nodes. Knows no model.

Every row that is run has C candidates, K of a level become its beams; K = C unless said otherwise.
Candidates are numbered flat: 0 .. C-1 at level 1, then K * C a level, beam by beam. All of them may
become nodes. Ties go to the lower number, so a parent always comes before its child.

Source: EAGLE-2's dynamic tree (Li et al. 2024) in SGLang's numbering.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graft.kernels.trees import DraftResults, LevelInfo, SelectedBeams


def select_top_k_tokens(
    step: int,
    topk_p: Tensor,
    topk_index: Tensor,
    hidden_states: Tensor,
    scores: Tensor | None,
    topk: int = 0,
) -> SelectedBeams:
    """The K best beams after growing one level.

    topk: K; 0 takes C.

    Shapes:
        step 0: topk_p, topk_index [batch, C], best first; hidden_states [batch, hidden]; scores
            None.
        later: topk_p, topk_index [batch * K, C] of the K beams; hidden_states [batch * K, hidden];
            scores [batch, K] of the beams.
    """
    children = topk_p.shape[1]
    topk = topk or children
    if scores is None:
        batch = topk_p.shape[0]
        parents = torch.arange(-1, topk, dtype=torch.int64).repeat(batch, 1)
        return SelectedBeams(
            input_ids=topk_index[:, :topk].flatten().long(),
            hidden_states=hidden_states.repeat_interleave(topk, dim=0),
            scores=topk_p[:, :topk],
            info=LevelInfo(topk_p.unsqueeze(1), topk_index.long(), parents),
        )
    batch = scores.shape[0]
    expand = scores.unsqueeze(2) * topk_p.reshape(batch, topk, children)
    best_scores, best = _top(expand.flatten(1), topk)
    tokens = topk_index.reshape(batch, topk * children).long()
    first_row = torch.arange(batch).unsqueeze(1) * topk
    return SelectedBeams(
        input_ids=tokens.gather(1, best).flatten(),
        hidden_states=hidden_states[(first_row + best // children).flatten()],
        scores=best_scores,
        info=LevelInfo(expand, tokens, best + topk * children * (step - 1) + children),
    )


def organize_draft_results(levels: Sequence[LevelInfo], num_draft_tokens: int) -> DraftResults:
    """The num_draft_tokens - 1 best candidates of all levels, in ascending flat number.

    Raises:
        ValueError: a score is NaN, or there are fewer candidates than wanted nodes.
    """
    scores = torch.cat([level.scores.flatten(1) for level in levels], dim=1)
    tokens = torch.cat([level.tokens for level in levels], dim=1)
    wanted = num_draft_tokens - 1
    if wanted > scores.shape[1]:
        raise ValueError(f"{wanted} nodes wanted, the levels hold {scores.shape[1]} candidates")
    if bool(torch.isnan(scores).any()):
        raise ValueError("a candidate's score is NaN")
    picked = torch.sort(_top(scores, wanted)[1], dim=1).values
    if len(levels) > 1:
        parent_list = torch.cat([level.parents for level in levels[:-1]], dim=1)
    else:
        parent_list = torch.empty(scores.shape[0], 0, dtype=torch.int64)
    return DraftResults(parent_list, picked, tokens.gather(1, picked))


def _top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, index = torch.sort(scores, dim=1, descending=True, stable=True)
    return values[:, :count], index[:, :count]
