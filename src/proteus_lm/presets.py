"""Sizes with names: shapes from the papers' families for every mixer, the MLP's width fitted so that a model has the parameters its
name says (vocabulary 32,000, embeddings and head apart and counted).

Widths, depths and heads are those of spec/linear.md 1 and spec/deep.md 1.9; no paper prints them all. docs/sizes.md is the table.
"""

from __future__ import annotations

import difflib
from typing import Any

from proteus_lm.config import CHAIN_PERIODS, ProteusConfig
from proteus_lm.mixers import registry
from proteus_lm.model import ProteusForCausalLM

VOCABULARY = 32_000
TILE = 64
"""Hidden units of an MLP (of each level of a chain) come in multiples of this."""
SIZES = {"20M": 20_000_000, "60M": 60_000_000, "170M": 170_000_000, "340M": 340_000_000, "760M": 760_000_000, "1.3B": 1_300_000_000}
_HIDDEN = dict(zip(SIZES, (256, 512, 768, 1024, 1536, 2048)))
_LAYERS = dict(zip(SIZES, (4, 8, 16, 24, 24, 24)))
# Layers that a family has otherwise; heads x width of keys by size. Blocks of 16 divide every width.
_OWN_LAYERS = {
    **{name: {"760M": 21, "1.3B": 21} for name in ("comba", "gated_deltanet")},
    "swla": {"1.3B": 18},
    "retnet": {"340M": 20},
}
_NARROW = dict(zip(SIZES, ((4, 64), (8, 64), (12, 64), (16, 64), (24, 64), (32, 64))))
_WIDE = dict(zip(SIZES, ((2, 128), (4, 128), (6, 128), (8, 128), (12, 128), (16, 128))))
# Keys of 3/4 of the width, values of 3/2.
_COMBA = dict(zip(SIZES, ((3, 64), (3, 128), (9, 64), (6, 128), (9, 128), (6, 256))))
_HEADS = {
    "attention": _NARROW,
    "retnet": dict(zip(SIZES, ((2, 128), (4, 128), (6, 128), (4, 256), (6, 256), (8, 256)))),
    "deltanet": _WIDE,
    "gated_deltanet": _COMBA,
    "comba": _COMBA,
    "swla": {**_WIDE, "1.3B": (8, 256)},
    "titans": _NARROW,
}
_FIELDS: dict[str, dict[str, Any]] = {"comba": {"value_expansion": 2}, "gated_deltanet": {"value_expansion": 2}}
# Comba's authors start the output correction at 0.02 at 340M and at 1 (the default) at 1.3B; what lies between is not printed.
_SMALL_CORRECTION = ("20M", "60M", "170M", "340M")
# An override of one of these asks for another size: the MLP keeps the width of the size it came from.
_SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "tie_word_embeddings")


def preset_fields(size: str, mixer: str, **overrides: Any) -> dict[str, Any]:
    """The fields of `preset`, as a plain dict that YAML can hold.

    Raises:
        ValueError: as `preset`.
    """
    for name, known, kind in ((size, SIZES, "size"), (mixer, _HEADS, "mixer")):
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise ValueError(f"no preset of {kind} {name!r}; {remedy}")
    heads, width = _HEADS[mixer][size]
    fields: dict[str, Any] = {
        "mixer": mixer,
        "vocab_size": VOCABULARY,
        "hidden_size": _HIDDEN[size],
        "num_hidden_layers": _OWN_LAYERS.get(mixer, {}).get(size, _LAYERS[size]),
        "num_heads": heads,
        "head_dim": width,
        "tie_word_embeddings": False,
        **_FIELDS.get(mixer, {}),
    }
    if mixer == "comba" and size in _SMALL_CORRECTION:
        fields["output_correction"] = 0.02
    fields |= {name: value for name, value in overrides.items() if name not in _SHAPE}
    fields["intermediate_size"] = _fitted(fields, SIZES[size])
    return fields | overrides


def preset(size: str, mixer: str, **overrides: Any) -> ProteusConfig:
    """The configuration of a named size.

    Args:
        size: 20M | 60M | 170M | 340M | 760M | 1.3B.
        mixer: a name of `proteus_lm.mixers.registry`.
        overrides: other fields of `ProteusConfig`. The MLP's width makes up for what they add or take away, so that the size stays,
            unless one of them is a size itself (vocabulary, width, layers, MLP, tied tables): then it keeps the preset's.

    Raises:
        ValueError: for a size or mixer without a preset, overrides that `ProteusConfig` refuses, or that leave no room for an MLP.
    """
    return ProteusConfig(**preset_fields(size, mixer, **overrides))


def _fitted(fields: dict[str, Any], target: int) -> int:
    """The MLP width, a multiple of the tile, with which a model comes nearest to `target` parameters."""
    levels = 1
    if fields.get("channel") == "chain":
        levels = len(fields.get("chain_periods") or CHAIN_PERIODS)
    unit = TILE * levels
    least, one_more = (ProteusForCausalLM.parameter_count(ProteusConfig(**fields, intermediate_size=n * unit)) for n in (1, 2))
    width = 1 + round((target - least) / (one_more - least))
    if width < 1:
        raise ValueError(f"a model of {fields} has {least:,} parameters with the smallest MLP, more than the {target:,} asked for")
    return width * unit


def table() -> str:
    """Markdown: every preset with its shape, its parameters by count, and operations a token at 8K."""
    lines = [
        "| size | mixer | layers | width | heads x keys (values) | MLP | parameters | of its name | GFLOP a token, 8K |",
        "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for size, target in SIZES.items():
        for name, fields in _rows():
            config = preset(size, fields.pop("mixer"), **fields)
            count = ProteusForCausalLM.parameter_count(config)
            flops = ProteusForCausalLM.flops_per_token(config, config.memory_context)
            heads = f"{config.num_heads} x {config.head_dim}"
            if config.value_expansion is not None:
                heads += f" ({config.head_dim * config.value_expansion})"
            shape = f"{config.num_hidden_layers} | {config.hidden_size} | {heads} | {config.intermediate_size}"
            lines.append(f"| {size} | {name} | {shape} | {count:,} | {count / target - 1:+.1%} | {flops / 1e9:.2f} |")
    return "\n".join(lines)


def _rows() -> list[tuple[str, dict[str, Any]]]:
    return [*((name, {"mixer": name}) for name in registry), ("Hope-Attention", {"mixer": "attention", "channel": "chain"})]


if __name__ == "__main__":
    print(table())
