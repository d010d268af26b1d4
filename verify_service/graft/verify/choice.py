"""From logits to outcomes: choose, walk, keep and score. Knows ops and laws; knows no session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from graft.common.errors import GraftError, NumericFailure
from graft.kernels.cpu.simulate import Simulation
from graft.kernels.ops import KvCache, Ops
from graft.kernels.rows import choice_rows, tree_rows
from graft.kernels.rules import REFUSED, Decision, decide, simulate
from graft.v1.sampling_pb2 import AcceptRule
from graft.verify.batch import Batch, Choice
from graft.verify.logprobs import score_tokens
from graft.verify.step import Outcome, Round, Step
from graft.verify.trace import traced


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """How a step is decided. simulation: of a replica for benchmarks, in place of deciding."""

    ops: Ops
    simulation: Simulation | None = None


def wants_logits(step: Step, batch: Batch, verdict: Verdict) -> bool:
    """True when anything of a step needs more of its logits than the coupled choice."""
    if verdict.simulation is not None or batch.prompt_rows:
        return True
    for choice in batch.choices:
        request = step.works[choice.work].session.request
        if not _is_coupled(choice) or request.want_logprobs or request.want_trace:
            return True
    return False


def settle(step: Step, batch: Batch, seen: Tensor, verdict: Verdict, kv: KvCache) -> list[Outcome]:
    """What every work of a step came to; in place on kv, accepted rows move to the front.

    seen: [outputs, vocab], float32, the logits of batch.output_rows; or [outputs], int32, their
        choices, where nothing `wants_logits`.
    """
    if seen.dim() == 1:
        return _settle_chosen(step, batch, seen, verdict, kv)
    logits = seen
    ops = verdict.ops
    outcomes = [Outcome() for _ in step.works]
    decided = []
    for choice in batch.choices:
        if verdict.simulation is not None and isinstance(step.works[choice.work], Round):
            outcomes[choice.work] = _simulated(step, choice, verdict.simulation, logits)
        else:
            decided.append(choice)
    decisions = _decide_all(step, decided, logits, ops)
    _keep(decided, decisions, ops, kv)
    for choice, decision in zip(decided, decisions, strict=True):
        outcome = _outcome(step, choice, decision, logits)
        if step.works[choice.work].session.request.want_trace and outcome.error is None:
            outcome = replace(outcome, trace=traced(choice.law, decision, logits[choice.rows], ops))
        outcomes[choice.work] = outcome
    for part in batch.prompt_rows:
        session = step.works[part.work].session
        former = outcomes[part.work]
        scores = score_tokens(logits[part.rows], part.tokens, session.request.num_top_logprobs)
        outcomes[part.work] = replace(former, prompt_logprobs=scores)
    return outcomes


def _settle_chosen(
    step: Step, batch: Batch, chosen: Tensor, verdict: Verdict, kv: KvCache
) -> list[Outcome]:
    decisions = _walk(batch.choices, chosen, verdict.ops)
    _keep(batch.choices, decisions, verdict.ops, kv)
    outcomes = [Outcome() for _ in step.works]
    for choice, decision in zip(batch.choices, decisions, strict=True):
        if (error := _error(step, choice, decision)) is not None:
            outcomes[choice.work] = Outcome(error=error)
            continue
        tokens = _tokens(choice, decision)
        outcomes[choice.work] = Outcome(tokens, len(tokens) - 1, nodes=decision.nodes)
    return outcomes


def _decide_all(step: Step, choices: Sequence[Choice], logits: Tensor, ops: Ops) -> list[Decision]:
    """Sessions under the coupled rule together, the others one by one."""
    coupled = [choice for choice in choices if _is_coupled(choice)]
    together = iter(_decide_coupled(coupled, logits, ops) if coupled else ())
    return [
        next(together)
        if _is_coupled(choice)
        else decide(choice.law, logits[choice.rows], _draft_probs(step, choice, logits.shape[1]))
        for choice in choices
    ]


def _draft_probs(step: Step, choice: Choice, vocab_size: int) -> Tensor | None:
    """[drafted nodes, vocab], float32: what the chain was drawn from; None when nothing was."""
    work = step.works[choice.work]
    steps = choice.law.tree.num_nodes - 1
    if not isinstance(work, Round) or not work.turn.probs or not steps:
        return None
    rows = [row.dense(vocab_size) for row in work.turn.probs[:steps]]
    return torch.from_numpy(np.stack(rows))


def _is_coupled(choice: Choice) -> bool:
    return choice.law.sampling.rule in (
        AcceptRule.ACCEPT_RULE_UNSPECIFIED,
        AcceptRule.ACCEPT_RULE_COUPLED,
    )


def _decide_coupled(choices: Sequence[Choice], logits: Tensor, ops: Ops) -> list[Decision]:
    laws = [choice.law for choice in choices]
    index = np.concatenate([np.arange(c.rows.start, c.rows.stop) for c in choices])
    chosen_from = logits[: len(index)]
    if len(index) and int(index[-1]) != len(index) - 1:
        chosen_from = logits[torch.from_numpy(index)]
    return _walk(choices, ops.choose(chosen_from, choice_rows(laws, logits.shape[1])), ops)


def _walk(choices: Sequence[Choice], chosen: Tensor, ops: Ops) -> list[Decision]:
    """chosen: [rows of all choices], int32."""
    trees = tree_rows([choice.law.tree for choice in choices])
    counts, paths = ops.accept(trees, chosen)
    tokens, starts = chosen.tolist(), trees.ptr.tolist()
    decisions = []
    for place, (count, path) in enumerate(zip(counts.tolist(), paths.tolist(), strict=True)):
        nodes = tuple(path[: count + 1])
        decisions.append(Decision(nodes, tokens[starts[place] + nodes[-1]]))
    return decisions


def _keep(choices: Sequence[Choice], decisions: Sequence[Decision], ops: Ops, kv: KvCache) -> None:
    """Moves the keys and values of accepted nodes to the front of their trees' slots."""
    source: list[int] = []
    target: list[int] = []
    for choice, decision in zip(choices, decisions, strict=True):
        for place, node in enumerate(decision.nodes):
            if node != place:
                source.append(int(choice.write_slots[node]))
                target.append(int(choice.write_slots[place]))
    if source:
        ops.keep(
            kv,
            torch.tensor(source, dtype=torch.int32),
            torch.tensor(target, dtype=torch.int32),
        )


def _outcome(step: Step, choice: Choice, decision: Decision, logits: Tensor) -> Outcome:
    if (error := _error(step, choice, decision)) is not None:
        return Outcome(error=error)
    return _scored(step, choice, decision.nodes, _tokens(choice, decision), logits)


def _error(step: Step, choice: Choice, decision: Decision) -> GraftError | None:
    """Why a decision may not stand, if so."""
    session, grammar = step.works[choice.work].session, step.works[choice.work].session.grammar
    if grammar is not None and grammar.failure is not None:
        return grammar.failure
    if decision.token == REFUSED:
        return NumericFailure(
            f"the target's logits after token {session.length} of the session are not numbers, "
            "or leave nothing to choose"
        )
    mask = choice.law.bitmask
    if grammar is None or mask is None:
        return None
    for node, token in zip(decision.nodes, _tokens(choice, decision), strict=True):
        if not grammar.allows(mask[node], token):
            return NumericFailure(f"token {token} was decided against the grammar of the session")
    return None


def _tokens(choice: Choice, decision: Decision) -> tuple[int, ...]:
    drafted = choice.law.tree.tokens[list(decision.nodes[1:])].tolist()
    return (*drafted, decision.token)


def _simulated(step: Step, choice: Choice, simulation: Simulation, logits: Tensor) -> Outcome:
    """A drawn length of the tree's first path, whose keys already stand where they belong."""
    commit = simulate(simulation, choice.law, logits[choice.rows])
    return _scored(step, choice, commit.nodes, commit.tokens, logits)


def _scored(
    step: Step, choice: Choice, nodes: tuple[int, ...], tokens: tuple[int, ...], logits: Tensor
) -> Outcome:
    """The outcome of `tokens`, one after each of `nodes`, with log-probabilities if asked for."""
    request = step.works[choice.work].session.request
    if not request.want_logprobs:
        return Outcome(tokens, len(nodes) - 1, nodes=nodes)
    rows = logits[choice.rows][torch.tensor(nodes)]
    scores = score_tokens(rows, np.asarray(tokens, np.int32), request.num_top_logprobs)
    return Outcome(tokens, len(nodes) - 1, scores, nodes=nodes)
