"""Weights and configurations of flash-linear-attention (fla-core 0.6; fla.layers, fla.models) as Proteus ones.

config = config_from_fla(json.loads(path.read_text()))  # fla's config.json
model = ProteusForCausalLM(config)
model.load_state_dict(from_fla(load_file("model.safetensors"), config))
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from proteus_lm.config import ProteusConfig

MODEL_TYPES = {"retnet": "retnet", "delta_net": "deltanet", "gated_deltanet": "gated_deltanet", "comba": "comba"}
"""Mixer by fla's model_type."""
# What fla calls the maps of our gates, in their order, and the other parameters of a head.
_GATES = {"deltanet": ("b_proj",), "gated_deltanet": ("b_proj", "a_proj"), "comba": ("b_proj", "a_proj")}
_SCALARS = {
    "gated_deltanet": {"A_log": "A_log", "dt_bias": "dt_bias"},
    "comba": {"A_log": "A_log", "dt_bias": "dt_bias", "inner": "decay"},
}
_BLOCK = {
    "mixer_norm": "attn_norm",
    "mlp_norm": "mlp_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
# Options of fla that change the model, with the values that ours has; a file written before an option existed lacks it.
_EVERYWHERE = {"attn": (None,), "attnres_block_size": (None,), "hidden_act": ("swish", "silu")}
_CONVOLVED = {"use_short_conv": (True,), "conv_bias": (False,)}
_OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "retnet": {"feature_map": (None,), "use_output_gate": (True,), "elementwise_affine": (True,)},
    "delta_net": {
        **_CONVOLVED,
        "use_gate": (False,),
        "allow_neg_eigval": (False,),
        "use_beta": (True,),
        "qk_norm": ("l2",),
        "qk_activation": ("silu",),
        "use_output_norm": (True,),
    },
    "gated_deltanet": {
        **_CONVOLVED,
        "use_gate": (True,),
        "allow_neg_eigval": (False,),
        "output_gate_activation": ("swish", "silu"),
    },
    "comba": {**_CONVOLVED, "use_output_gate": (True,), "use_inner_decay": (True,)},
}


def config_from_fla(values: Mapping[str, Any], **changes: Any) -> ProteusConfig:
    """The configuration of the model that fla's config.json describes.

    Args:
        values: the file's contents; its model_type is one of `MODEL_TYPES`.
        changes: fields of ProteusConfig to set besides or instead, such as memory_blocks and memory_context.

    Raises:
        ValueError: for another model_type, an option that changes the model and that Proteus lacks, or a size that is missing.
    """
    kind = values.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"model_type is {kind!r}; of fla's models these can be taken over: {', '.join(MODEL_TYPES)}")
    for name, known in {**_EVERYWHERE, **_OPTIONS[kind]}.items():
        value = values.get(name, known[0])
        if value not in known:
            raise ValueError(f"{name} is {value!r} in this {kind} model; Proteus has only {' or '.join(map(repr, known))}")
    size = _Sizes(values)
    hidden, heads = size["hidden_size"], size["num_heads"]
    for name in ("num_kv_heads", "num_v_heads"):
        if values.get(name) not in (None, heads):
            raise ValueError(f"{name} is {values[name]} and num_heads {heads} in this {kind} model; Proteus has as many of both")
    keys = values["head_dim"] if "head_dim" in values else _whole("expand_k", hidden * size["expand_k"] / heads)
    width = keys * size["expand_v"] if "head_dim" in values else hidden * size["expand_v"] / heads
    inner = values.get("intermediate_size")
    if inner is None:  # fla.modules.GatedMLP
        inner = 256 * math.ceil(int(hidden * size["hidden_ratio"] * 2 / 3) / 256)
    fields: dict[str, Any] = {
        "mixer": MODEL_TYPES[kind],
        "num_heads": heads,
        "head_dim": keys,
        "value_expansion": _whole("expand_v", width / keys),
        "intermediate_size": inner,
    }
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "norm_eps"):
        fields[name] = size[name]
    for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):
        if values.get(name) is not None:
            fields[name] = values[name]
    if kind != "retnet":
        fields["conv_size"] = size["conv_size"]
    if kind == "comba":
        fields["inner_decay"] = "before_norm"
        fields["output_correction"] = values.get("correction_factor", 1.0) if values.get("use_output_correction", True) else 0.0
    return ProteusConfig(**{**fields, **changes})


class _Sizes(dict[str, Any]):
    """A configuration's values, asked for by name."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"this configuration has no {name}; give fla's whole config.json")


def _whole(name: str, value: float) -> int:
    if value < 1 or value != round(value):
        raise ValueError(f"{name} gives {value}, and Proteus needs a whole number: keys of a head, or values of a head in its keys")
    return round(value)


def from_fla(state_dict: Mapping[str, Tensor], config: ProteusConfig) -> dict[str, Tensor]:
    """A state dict of fla under Proteus' names and in its layout.

    RetNet's rows of q and k go from half-split rotary pairs (i, i + K/2), as in fla, to the interleaved (2i, 2i + 1); one order
    for both, so that their products stay.

    Args:
        state_dict: of a whole model ("model.layers.0.attn.q_proj.weight", ...) of `fla.models`, or of one layer
            ("q_proj.weight", ...) of `fla.layers`.
        config: of the model to load into; `config_from_fla` gives it.

    Returns:
        A state dict for a `ProteusForCausalLM` of this configuration, or for its mixer. Tensors keep their types; those that
        need no change are not copied.

    Raises:
        ValueError: for a mixer that fla lacks, options that change what the weights mean, and names missing or left over.
    """
    mixers = tuple(MODEL_TYPES.values())
    if config.mixer not in mixers:
        raise ValueError(f"mixer is {config.mixer!r}; weights of fla can be taken over for: {', '.join(mixers)}")
    if config.mixer == "comba" and config.inner_decay != "before_norm":
        raise ValueError(
            f"inner_decay is {config.inner_decay!r}, and fla's Comba decays before the norm of the keys; use 'before_norm'"
        )
    source = _Source(state_dict)
    converted = _mixer(source, "", config) if "q_proj.weight" in state_dict else _model(source, config)
    source.check_empty()
    return converted


class _Source:
    """A state dict from which each tensor is taken once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        # Files of older releases hold the rotary frequencies, which are no weights.
        self.tensors = {name: x for name, x in tensors.items() if not name.endswith("rotary.inv_freq")}

    def take(self, name: str) -> Tensor:
        """The tensor, no longer there afterwards."""
        if name not in self.tensors:
            close = difflib.get_close_matches(name, self.tensors, n=1)
            raise ValueError(
                f"{name!r} is not among these weights" + (f"; the nearest is {close[0]!r}" if close else "") + "; does the "
                "configuration belong to them?"
            )
        return self.tensors.pop(name)

    def check_empty(self) -> None:
        """Raise ValueError for what nothing asked for: it would change the model."""
        if self.tensors:
            names = ", ".join(sorted(self.tensors)[:4])
            raise ValueError(f"{len(self.tensors)} of these weights have no place in this configuration: {names}")


def _model(source: _Source, config: ProteusConfig) -> dict[str, Tensor]:
    tensors = {"embed_tokens.weight": source.take("model.embeddings.weight"), "norm.weight": source.take("model.norm.weight")}
    if config.tie_word_embeddings:
        source.tensors.pop("lm_head.weight", None)
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    else:
        tensors["lm_head.weight"] = source.take("lm_head.weight")
    for i in range(config.num_hidden_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        for name, other in _BLOCK.items():
            tensors[f"{ours}{name}.weight"] = source.take(f"{theirs}{other}.weight")
        for name, tensor in _mixer(source, f"{theirs}attn.", config).items():
            tensors[f"{ours}mixer.{name}"] = tensor
    return tensors


def _mixer(source: _Source, prefix: str, config: ProteusConfig) -> dict[str, Tensor]:
    def take(name: str) -> Tensor:
        return source.take(prefix + name)

    retention = config.mixer == "retnet"
    q, k, v = (take(f"{name}_proj.weight") for name in "qkv")
    if retention:
        q, k = (_interleave(x, config) for x in (q, k))
    tensors = {"projection.linear.weight": torch.cat((q, k, v))}
    if not retention:
        taps = [take(f"{name}_conv1d.weight").squeeze(1) for name in "qkv"]
        tensors["projection.conv.weight"] = torch.cat(taps)
    if config.mixer in _GATES:
        tensors["gates.weight"] = torch.cat([take(f"{name}.weight") for name in _GATES[config.mixer]])
    for name, other in _SCALARS.get(config.mixer, {}).items():
        tensors[name] = take(other)
    if config.mixer == "comba" and config.output_correction:
        tensors["D"] = take("D")
    if config.mixer != "deltanet":
        tensors["output.gate.weight"] = take("g_proj.weight")
    fused = prefix + "g_norm_swish_gate.weight" in source.tensors
    tensors["output.norm.weight"] = take(("g_norm_swish_gate" if fused else "g_norm" if retention else "o_norm") + ".weight")
    tensors["output.out.weight"] = take("o_proj.weight")
    return tensors


def _interleave(weight: Tensor, config: ProteusConfig) -> Tensor:
    """Rows of each head from (i, i + K/2) to (2i, 2i + 1). weight: (H K, hidden)."""
    heads, dim = config.num_heads, config.head_dim
    if weight.shape[0] != heads * dim:
        raise ValueError(f"a map of q or k has {weight.shape[0]} rows; {heads} heads of head_dim {dim} need {heads * dim}")
    return weight.unflatten(0, (heads, 2, dim // 2)).transpose(1, 2).flatten(0, 2)
