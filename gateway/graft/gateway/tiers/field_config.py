"""The field's adaptive config: a JSON file as SGLang reads it, its presets, and one of ours.

long_chains is for a drafter that is hardly ever wrong and takes its time on the cores: long
chains for up to three sessions, none where more fill a step by themselves.

Knows keys and defaults; decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from graft.common.errors import InvalidArgument

PRESETS = ("default", "conservative", "aggressive", "long_chains")
_FLOATS = ("ema_alpha", "up_hysteresis", "down_hysteresis", "ceiling_coeff")
_INTS = ("update_interval", "warmup_batches")
_KEYS = ("candidate_steps", *_FLOATS, *_INTS)
_MAX_STEPS = 255


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """One range of batch sizes: the depths to choose from, ascending, and how to choose."""

    candidate_steps: tuple[int, ...]
    ema_alpha: float = 0.2
    update_interval: int = 5
    warmup_batches: int = 10
    up_hysteresis: float = 0.0
    down_hysteresis: float = -0.25
    ceiling_coeff: float = 0.0


@dataclass(frozen=True, slots=True)
class FieldConfig:
    """Slots by the least batch size they are for, ascending; at least one."""

    slots: Mapping[int, SlotConfig]

    @property
    def steps(self) -> list[int]:
        """All depths of all slots, ascending."""
        return sorted({step for slot in self.slots.values() for step in slot.candidate_steps})

    @property
    def middle_steps(self) -> int:
        """The depth to begin with when nobody names one."""
        return self.steps[len(self.steps) // 2]


def load(source: str) -> FieldConfig:
    """The config of a preset's name or of a file.

    Raises:
        InvalidArgument: there is no such file, or it does not read.
    """
    if source in PRESETS:
        text = (resources.files("graft.gateway.tiers") / "presets" / f"{source}.json").read_text()
        return parse(text, source)
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(
            f"{source} is neither a preset ({', '.join(PRESETS)}) nor a file: {error}",
            field="tier_config",
        ) from None
    return parse(text, source)


def parse(text: str, name: str = "the tier config") -> FieldConfig:
    """Reads the JSON: keys of digits are slots, the others are defaults of every slot.

    A file without slots, as older releases wrote it, is one slot for every batch size.

    Raises:
        InvalidArgument: something is missing, unknown or out of range.
    """
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise _bad(name, f"not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise _bad(name, "expected a JSON object")
    defaults = {key: value for key, value in tree.items() if not key.isdigit()}
    slots = {int(key): value for key, value in tree.items() if key.isdigit()}
    if not slots and "candidate_steps" in defaults:
        slots = {1: {}}
    if not slots:
        raise _bad(name, 'no batch-size slot: expected a key such as "1"')
    read = {}
    for least, slot in sorted(slots.items()):
        if not isinstance(slot, dict):
            raise _bad(name, f"slot {least} is not an object")
        read[least] = _slot(name, least, {**defaults, **slot})
    return FieldConfig(read)


def _slot(name: str, least: int, values: dict[str, Any]) -> SlotConfig:
    unknown = sorted(set(values) - set(_KEYS))
    if unknown:
        raise _bad(name, f"slot {least} has unknown keys {unknown}, expected {', '.join(_KEYS)}")
    steps = values.pop("candidate_steps", None)
    if (
        not isinstance(steps, list)
        or not steps
        or any(type(step) is not int or not 0 <= step <= _MAX_STEPS for step in steps)
    ):
        raise _bad(name, f"slot {least}: candidate_steps is {steps}, expected depths from 0 on")
    for key in (*_FLOATS, *_INTS):
        value = values.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _bad(name, f"slot {least}: {key} is {value!r}, expected a number")
    slot = SlotConfig(tuple(sorted(set(steps))), **values)
    if not 0 < slot.ema_alpha <= 1:
        raise _bad(name, f"slot {least}: ema_alpha is {slot.ema_alpha}, expected 0 to 1")
    if slot.update_interval < 1 or slot.warmup_batches < 0:
        raise _bad(name, f"slot {least}: update_interval is below 1 or warmup_batches below 0")
    return slot


def _bad(name: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"{name}: {why}", field="tier_config")
