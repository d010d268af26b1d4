"""The field's adaptive depth: an EMA of accepted drafts, thresholds and batch-size slots.

A state machine without I/O. Knows accepted counts and batch sizes; knows no cost and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from graft.common.errors import InvalidArgument
from graft.common.tier import Tier
from graft.gateway.tiers.field_config import FieldConfig, SlotConfig


class Slot:
    """The depth for one range of batch sizes.

    Source:
        SGLang's adaptive speculative parameters, release 0.5.23.
    """

    def __init__(self, config: SlotConfig, initial_steps: int) -> None:
        candidates = config.candidate_steps
        self.steps = (
            initial_steps if initial_steps in candidates else candidates[len(candidates) // 2]
        )
        self.ema = float(self.steps - 1)
        self._config = config
        self._num_batches = 0

    def update(self, accepted: Sequence[int]) -> bool:
        """Takes the accepted drafts of a batch, one number a session; True when `steps` changed."""
        if not accepted:
            return False
        config = self._config
        if self.steps > 0:
            mean = sum(accepted) / len(accepted)
            self.ema = (1 - config.ema_alpha) * self.ema + config.ema_alpha * mean
        self._num_batches += 1
        past = self._num_batches - config.warmup_batches
        if past <= 0 or past % config.update_interval:
            return False
        before = self.steps
        self.steps = self._decide()
        return self.steps != before

    def _decide(self) -> int:
        config, candidates = self._config, self._config.candidate_steps
        at = candidates.index(self.steps)
        if self.steps == 0:
            # Nothing can be seen at depth 0, so it is always left again.
            target = candidates[min(at + 1, len(candidates) - 1)]
            if self.ema < 0:
                self.ema = float(target - 1)
            return target
        target = at
        while target > 0 and self.ema <= self._floor(candidates[target - 1]):
            target -= 1
        if target == at:
            while (
                target + 1 < len(candidates)
                and self.ema > candidates[target] - 0.5 + config.up_hysteresis
            ):
                target += 1
        if config.ceiling_coeff > 0 and target <= at:
            ceiling = max(1, math.ceil(self.ema * config.ceiling_coeff))
            while target > 0 and candidates[target] > ceiling:
                target -= 1
        return candidates[target]

    def _floor(self, lower: int) -> float:
        """The EMA at or below which `lower` is deep enough."""
        return (0.5 if lower == 0 else lower - 0.5) + self._config.down_hysteresis


class AdaptiveSteps:
    """Slots by batch size, each with its own EMA and depth.

    `padded` are batch sizes that a batch is padded up to before its slot is looked up, as captured
    graphs ask for; none means that batches run as they are.

    Raises:
        InvalidArgument: no slot knows `initial_steps`.
    """

    def __init__(
        self, config: FieldConfig, initial_steps: int | None = None, padded: Sequence[int] = ()
    ) -> None:
        if initial_steps is None:
            initial_steps = config.middle_steps
        if initial_steps not in config.steps:
            raise InvalidArgument(
                f"the first depth is {initial_steps}, the candidates are {config.steps}",
                field="tier_config",
            )
        self._slots = {
            least: Slot(slot, initial_steps) for least, slot in sorted(config.slots.items())
        }
        self._padded = sorted(padded)

    def slot(self, batch_size: int) -> Slot:
        """The slot of a batch: the greatest one not above it, or the least of all."""
        size = next((padded for padded in self._padded if padded >= batch_size), batch_size)
        fitting = [least for least in self._slots if least <= size]
        return self._slots[max(fitting) if fitting else min(self._slots)]

    def steps(self, batch_size: int) -> int:
        """The depth for the next round of a batch."""
        return self.slot(batch_size).steps

    def update(self, accepted: Sequence[int], batch_size: int | None = None) -> bool:
        """Takes what one batch accepted; True when its slot's depth changed."""
        return self.slot(len(accepted) if batch_size is None else batch_size).update(accepted)


def at_depth(base: Tier, steps: int) -> Tier:
    """A proposer's tier with another depth; its width stays, its nodes keep their share of a level.

    With one child a node this is the field's chain of `steps + 1` nodes.
    """
    if steps == 0 or base.num_steps == 0:
        return replace(base, num_steps=0, num_draft_tokens=0, lookahead=0)
    if base.topk == 1:
        return replace(base, num_steps=steps, num_draft_tokens=steps + 1)
    per_level = (base.num_draft_tokens - 1) / base.num_steps
    return replace(base, num_steps=steps, num_draft_tokens=1 + max(steps, round(per_level * steps)))
