"""Where an EAGLE-3 head starts from: its target's own last layer, norms and head rows.

Knows the target's files and how large states are; trains nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.draft.checkpoints.borrowed import Borrowed
from graft.models.rope import rope_table
from graft.models.weights import FINAL_NORM
from graft.train.eagle3 import Eagle3Net, Eagle3Shape
from graft.train.export import Eagle3Target
from graft.train.plan import default_layers


def eagle3_layers(num_layers: int) -> tuple[int, ...]:
    """States 2, n/2 and n - 3; for targets too shallow for that the last three of a corpus."""
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    return default_layers(num_layers)[-3:]


def eagle3_target(
    borrowed: Borrowed, layers: tuple[int, ...], draft_tokens: Tensor
) -> Eagle3Target:
    """The target as a head in training needs it; the embedding in half precision."""
    return Eagle3Target(
        config=borrowed.raw,
        num_layers=borrowed.num_layers,
        head_dim=borrowed.config.head_dim,
        embedding=borrowed.embedding(),
        layers=layers,
        draft_tokens=draft_tokens,
    )


def fresh_eagle3(
    borrowed: Borrowed, target: Eagle3Target, state_sizes: Tensor, dtype: torch.dtype
) -> Eagle3Net:
    """A net that starts as the target's last layer, run once more on its deepest state.

    The half of attention that reads embeddings starts at zero, fc passes the deepest state on.
    Random draws come from torch's global generator.

    Shapes:
        state_sizes: [states * hidden], root mean square of each channel over the corpus.
    """
    config = borrowed.config
    shape = Eagle3Shape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_states=len(target.layers),
        draft_vocab_size=len(target.draft_tokens),
        eps=config.rms_norm_eps,
    )
    net = Eagle3Net(shape, rope_table(config.rope, config.head_dim, config.context_length), dtype)
    last = f"model.layers.{config.num_layers - 1}"

    def read(name: str) -> Tensor:
        return borrowed.source.read(f"{last}.{name}.weight")

    hidden = config.hidden_size
    deepest = state_sizes[-hidden:]
    # One unit for the whole residual, so that weights have sizes that optimizers like.
    unit = float(deepest.median())
    with torch.no_grad():
        net.state_scale.copy_(1 / state_sizes.clamp(min=1e-6))
        net.fc.mul_(0.1)
        net.fc[:, -hidden:] += torch.diag(deepest / unit)
        own = torch.cat([read(f"self_attn.{part}_proj") for part in "qkv"])
        net.qkv[:, :hidden].mul_(0.1)
        net.qkv[:, hidden:] = own
        net.output.copy_(read("self_attn.o_proj") / unit)
        net.gate_up.copy_(torch.cat([read("mlp.gate_proj"), read("mlp.up_proj")]))
        net.down.copy_(read("mlp.down_proj") / unit)
        net.hidden_norm.copy_(read("input_layernorm"))
        net.mlp_norm.copy_(read("post_attention_layernorm"))
        net.final_norm.copy_(borrowed.source.read(FINAL_NORM))
        net.head.copy_(borrowed.head_weight()[target.draft_tokens])
    return net
