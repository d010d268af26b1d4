"""How each family writes down its MTP layers: names, order, norms, and the heads of attention.

Knows config.json and names; reads no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from graft.models.config import SLIDING_ATTENTION


@dataclass(frozen=True, slots=True)
class StepShape:
    """The decoder layer of one step.

    config: in the keys of a plain decoder. rotary_factor: share of a head that rotates.
    value_dim: of a head's values; 0 is that of its keys. value_scale: on the values.
    """

    config: Mapping[str, Any]
    rotary_factor: float = 1.0
    value_dim: int = 0
    value_scale: float = 1.0
    window: int = 0


_Shape = Callable[[Mapping[str, Any], int], StepShape]


@dataclass(frozen=True, slots=True)
class Layout:
    """One family's.

    mark: a name that speaks for the layout. prefix: of the tensors of a step, by its number.
    behind_target: step 0 has the number num_hidden_layers, not 0.
    project: reads embedding and state side by side, the state first with hidden_first.
    head: of the step itself; "" shares the target's. plus_one: norms multiply by 1 + weight.
    chain: with several steps, each reads the state of the one before.
    """

    name: str
    mark: re.Pattern[str]
    prefix: str
    shape: _Shape
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    project: str = "eh_proj"
    mlp_norm: str = "post_attention_layernorm"
    final_norm: str = "shared_head.norm"
    head: str = ""
    behind_target: bool = True
    hidden_first: bool = False
    plus_one: bool = False
    blank_start: bool = False
    chain: bool = True
    recurrent_only: bool = False
    multi_layer_only: bool = False

    def number_of(self, name: str) -> int | None:
        """The number in a tensor's name; None for a tensor of no step."""
        before, after = self.prefix.split("{}")
        found = re.fullmatch(rf"{re.escape(before)}(\d+){re.escape(after)}\..*", name)
        return None if found is None else int(found[1])

    def first_number(self, config: Mapping[str, Any], names: Collection[str]) -> int:
        """The number of step 0. An export of one layer alone calls it 0."""
        if not self.behind_target:
            return 0
        layers = int(config.get("num_hidden_layers") or 1)
        alone = layers == 1 and all(self.number_of(name) != 1 for name in names)
        return 0 if alone else layers


def _plain(config: Mapping[str, Any], step: int) -> StepShape:
    factor = float(config.get("partial_rotary_factor") or 1.0)
    return StepShape(config, rotary_factor=factor)


def _mimo_v2(config: Mapping[str, Any], step: int) -> StepShape:
    """The sliding kind of attention, whose keys have names of their own."""
    shape = dict(config)
    renamed = {
        "num_attention_heads": "swa_num_attention_heads",
        "num_key_value_heads": "swa_num_key_value_heads",
        "head_dim": "swa_head_dim",
        "rope_theta": "swa_rope_theta",
        "rms_norm_eps": "layernorm_epsilon",
    }
    for plain, own in renamed.items():
        if config.get(own) is not None:
            shape[plain] = config[own]
    return StepShape(
        shape,
        rotary_factor=float(config.get("partial_rotary_factor") or 1.0),
        value_dim=int(config.get("swa_v_head_dim") or 0),
        value_scale=float(config.get("attention_value_scale") or 1.0),
        window=int(config.get("sliding_window_size") or config.get("sliding_window") or 0),
    )


def _step3p5(config: Mapping[str, Any], step: int) -> StepShape:
    """Lists with an entry a layer, the target's first; sliding layers may have other heads."""
    place = int(config.get("num_hidden_layers") or 1) + step
    shape = dict(config)
    if "num_attention_groups" in config:
        shape["num_key_value_heads"] = config["num_attention_groups"]
    kind = _entry(config.get("layer_types"), place)
    if kind == SLIDING_ATTENTION:
        other = config.get("attention_other_setting") or {}
        if "num_attention_groups" in other:
            shape["num_key_value_heads"] = other["num_attention_groups"]
        shape |= {key: other[key] for key in ("num_attention_heads", "head_dim") if key in other}
    theta = _entry(config.get("rope_theta"), place)
    if theta is not None:
        shape["rope_theta"] = theta
    factor = _entry(config.get("partial_rotary_factors"), place)
    window = config.get("sliding_window") if kind == SLIDING_ATTENTION else 0
    return StepShape(shape, rotary_factor=float(factor or 1.0), window=int(window or 0))


def _entry(value: Any, place: int) -> Any:
    if not isinstance(value, list):
        return value
    return value[place] if place < len(value) else None


LAYOUTS = (
    Layout(
        name="MiMo",
        mark=re.compile(r"model\.mtp_layers\.\d+\..*"),
        prefix="model.mtp_layers.{}",
        shape=_plain,
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        project="input_proj",
        final_norm="final_layernorm",
        behind_target=False,
        hidden_first=True,
        blank_start=True,
        recurrent_only=True,
    ),
    Layout(
        name="MiMo-V2",
        mark=re.compile(r"model\.mtp\.layers\.\d+\..*"),
        prefix="model.mtp.layers.{}",
        shape=_mimo_v2,
        mlp_norm="pre_mlp_layernorm",
        final_norm="final_layernorm",
        behind_target=False,
        chain=False,
        multi_layer_only=True,
    ),
    Layout(
        name="Step-3.5",
        mark=re.compile(r"model\.layers\.\d+\.shared_head\.output\.weight"),
        prefix="model.layers.{}",
        shape=_step3p5,
        head="shared_head.output",
        plus_one=True,
        multi_layer_only=True,
    ),
    Layout(
        name="NextN",
        mark=re.compile(r"model\.layers\.\d+\.(eh_proj|enorm|hnorm|shared_head\.norm)\.weight"),
        prefix="model.layers.{}",
        shape=_plain,
    ),
)
