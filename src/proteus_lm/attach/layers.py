"""Which foreign layers can be gated, and the rule each of them calls.

Every layer here computes q, k and v and hands them to a function that it looks up in its module. That function is the rule; it is
the only place the gate needs. The list is explicit because a layer that calls the same rule may feed it tokens in another order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Layer:
    """What the gate has to know of a class of layers.

    Args:
        rules: names of the functions of the layer's module that update and read its memory; a forward calls exactly one, once.
        arguments: what the rule calls its queries, keys and values, in the order of a positional call.
        partners: other arguments normalised with queries and keys (Comba's p).
        cache: whose cache the layer is given: "hf" (transformers) or "fla" (flash-linear-attention).
        key_dim, value_dim: attributes that hold the size of a head's key and value.
        normalises: whether the rule is told to divide queries and keys by their length.
        rotary: keys carry rotary positions in pairs (i, i + K/2), so that a block is made of whole pairs.
    """

    rules: tuple[str, ...]
    arguments: tuple[str, str, str] = ("query", "key", "value")
    partners: tuple[str, ...] = ()
    cache: str = "hf"
    key_dim: str = "head_k_dim"
    value_dim: str = "head_v_dim"
    normalises: bool = True
    rotary: bool = False


def _fla(*rules: str, **options: Any) -> Layer:
    return Layer(rules, ("q", "k", "v"), cache="fla", **options)


_DELTA = Layer(("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"))

LAYERS = {
    # transformers
    "Qwen3NextGatedDeltaNet": _DELTA,
    "Qwen3_5GatedDeltaNet": _DELTA,
    "Qwen3_5MoeGatedDeltaNet": _DELTA,
    "OlmoHybridGatedDeltaNet": _DELTA,
    "KimiLinearDeltaAttention": Layer(
        ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"), key_dim="head_dim", value_dim="head_dim"
    ),
    # flash-linear-attention
    "Comba": _fla("chunk_comba", "fused_recurrent_comba", partners=("p",)),
    "DeltaNet": _fla("chunk_delta_rule", "fused_recurrent_delta_rule"),
    "GatedDeltaNet": _fla("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "GatedLinearAttention": _fla("chunk_gla", "fused_recurrent_gla", normalises=False),
    "MultiScaleRetention": _fla(
        *("chunk_retention", "fused_chunk_retention", "fused_recurrent_retention", "parallel_retention"),
        normalises=False,
        rotary=True,
    ),
}


def layer_of(module: nn.Module) -> Layer | None:
    """The entry of `LAYERS` for a module or one of its base classes, or None. A class of that name elsewhere does not count."""
    for base in type(module).__mro__:
        if base.__name__ in LAYERS and base.__module__.startswith(("transformers.models.", "fla.layers.")):
            return LAYERS[base.__name__]
    return None


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """The function that a layer's class defines as its forward, without decorators."""
    return inspect.unwrap(type(module).forward)


def normalises(module: nn.Module, layer: Layer) -> bool:
    """Whether this very layer has its rule normalise queries and keys (DeltaNet has other choices)."""
    return layer.normalises and getattr(module, "qk_norm", "l2") == "l2"


def why_not(model: nn.Module) -> str:
    """Why a model has no layer to gate, in a sentence naming what it has instead."""
    names = sorted({type(m).__name__ for m in model.modules()})
    reasons = []
    if mamba := [n for n in names if "mamba" in n.lower()]:
        reasons.append(f"{', '.join(mamba)}: a state-space memory is not written under keys: it has no rows to open")
    if softmax := [n for n in names if n.lower().endswith(("attention", "attn"))]:
        reasons.append(f"{', '.join(softmax)}: softmax attention keeps every token: there is no memory of fixed size to open")
    found = "; ".join(reasons) or f"its modules are {', '.join(names[:12])}"
    return f"no layer of this model can be gated ({found}). Layers that can: {', '.join(LAYERS)}"
