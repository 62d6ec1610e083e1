"""One configuration for every model. A field either changes the model or raises; an unknown key raises."""

from __future__ import annotations

import difflib
import math
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

from transformers import PreTrainedConfig

from proteus_lm.hope import check_chain
from proteus_lm.mixers import registry, titans_forms
from proteus_lm.mixers.base import Mixer
from proteus_lm.mixers.combine import COMBINE
from proteus_lm.schedule import ActivationSchedule

_COUNTS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "head_dim", "value_expansion", "intermediate_size"),
    *("conv_size", "swla_window", "memory_blocks", "memory_context", "memory_depth", "memory_expansion", "chunk_size"),
    "update_blocks",
)
_OPTIONAL_COUNTS = ("window", "segment_length")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_POSITIVE = ("norm_eps", "theta_scale")
_OPTIONAL_POSITIVE = ("surprise_clip",)
_NOT_NEGATIVE_COUNTS = ("persistent_tokens",)
_NOT_NEGATIVE = ("output_correction",)
_SWITCHES = ("tie_word_embeddings", "memory_residual_norm", "use_momentum", "use_forgetting", "use_cache")
_CHOICES = {
    "mixer": tuple(registry),
    "channel": ("mlp", "chain"),
    "memory_axis": ("key", "value"),
    "memory_policy": ("uniform", "stretch", "custom"),
    "norm_order": ("norm_then_mask", "mask_then_norm"),
    "positions": ("document", "window"),
    "memory_activation": ("gelu_tanh", "silu", "swiglu"),
    "read": ("post", "pre"),
    "decay_target": ("zero", "init"),
    "titans_variant": tuple(titans_forms),
    "mag_combine": tuple(COMBINE),
    "inner_decay": ("after_norm", "before_norm"),
}
# How a memory is cut means nothing while it is one block.
_NEED_BLOCKS = ("memory_axis", "norm_order", "memory_policy", "memory_unlocks")
_NEED_CHAIN = ("chain_periods", "update_blocks", "schedule_frac")
# Of generation, of training, of the schedule.
_NOT_SHAPE = (*_TOKENS, "use_cache", "update_blocks", "schedule_frac", "memory_context", "memory_policy", "memory_unlocks")
CHAIN_PERIODS = (1, 2, 4, 8)
"""Of a chain of four levels: the papers print no periods, these are a guess."""
# Of the keys every Hugging Face configuration takes: those that would change nothing here.
_INERT = ("chunk_size_feed_forward", "is_encoder_decoder", "output_attentions", "problem_type", "num_labels")


class ProteusConfig(PreTrainedConfig):
    """Shape of a language model; the defaults make a small one that works.

    Args:
        mixer: token mixer, a name of `proteus_lm.mixers.registry`.
        vocab_size: tokens. The default is the byte tokenizer's.
        hidden_size: width of the residual stream.
        num_hidden_layers: layers, each a mixer and an MLP.
        num_heads, head_dim: heads of the mixer and their width (K); head_dim None is hidden_size / num_heads.
        value_expansion: width of a head's values in head_dim (matrix memories); None is 2 for retnet, else 1.
        intermediate_size: width of the SwiGLU MLP; None is 8/3 hidden_size, rounded up to a multiple of 64.
        conv_size: taps of the short convolution.
        norm_eps: of every RMSNorm.
        tie_word_embeddings: the output head is the embedding table.
        memory_blocks: E, blocks of the memory; 1 is the base model.
        memory_context: N, tokens over which the blocks open: the training context. With one block it only records that context.
        memory_axis: blocks of "key" rows or "value" columns (matrix memories; Titans' blocks are hidden units).
        memory_policy: when blocks open (docs/policies.md): "uniform", evenly over memory_context; "stretch", so too, and at
            inference over any length given to `ProteusForCausalLM.set_context`; "custom", at memory_unlocks.
        memory_unlocks: of policy "custom", the position at which each block opens: memory_blocks numbers that do not fall, the
            first 0; or a function of a block's number, kept (and saved) as the numbers it gives.
        norm_order: norm_then_mask | mask_then_norm of keys and queries (spec/linear.md 2.7).
        positions: a token's position counts in its "document" (packed training gives boundaries), or in the "window" as a whole.
        window: tokens attention sees, itself included; None for all, and 512 with titans_variant mag and mal.
        swla_window: c, pairs that a token of sliding-window linear attention writes.
        memory_depth, memory_expansion, memory_activation: layers of Titans' memory, its hidden width in head_dim, the function
            between (gelu_tanh | silu | swiglu; with swiglu a hidden layer has two matrices).
        memory_residual_norm: Titans' memory is x + LN(MLP(x)); the norm's gain and bias are learned, but not written by tokens.
            In chunks below sqrt(2 head_dim) tokens it takes smaller steps; from three layers on give it decay_target "init"
            (docs/titans-forms.md).
        chunk_size: tokens whose gradients are taken at the same weights (Titans' inner chunk; part of the model).
        read: of the memory with ("post") or without ("pre", Proteus eq 11 to the letter) the token's own write.
        use_momentum, use_forgetting: Titans' gates eta and alpha.
        decay_target: what forgetting pulls Titans' memory to: "zero" as printed, or its learned start, "init" (docs/choices.md).
        surprise_clip: limit of the norm of a token's inner gradient, all matrices of a head's memory together; None for none.
        theta_scale: bound of theta * chunk_size / (1 - eta) with one and two layers; with L of them it is 2 / L of that (swiglu:
            3/11 with three, 3/43 with four), so that 1, the default, is safe at every depth for weights about as large as they are
            drawn. Training that makes them large (AdamW at 1e-2, swiglu of four layers) needs a surprise_clip of 1, or a lower
            learning rate (spec/deep.md 6, docs/titans-forms.md).
        titans_variant: form of Titans (docs/titans-forms.md): lmm, the memory alone; mac, mag, mal with attention.
        persistent_tokens: learned rows of each block before every document, written to Titans' memory as one inner chunk (not with
            mac), and seen by all tokens of its attention; 0 for none.
        segment_length: tokens of a segment of mac, a multiple of chunk_size; None is 512 there.
        mag_combine: sigmoid_gate | silu | add, how mag joins attention and memory.
        inner_decay: Comba's p = sigmoid(b) k after the norm of k ("after_norm"), or before ("before_norm", as fla).
        output_correction: initial D of Comba's q' = q - D p; 0 for none. Its authors use 0.02 at 340M and 1 at 1.3B.
        channel: after the mixer, one "mlp" or Hope's "chain" of them, of the same hidden width together.
        chain_periods: C of each level of the chain, optimiser steps between two updates; None is (1, 2, 4, 8) for a chain.
        update_blocks: E, blocks of hidden units of a chain's MLPs that open for updates over training; 1 for no gate.
        schedule_frac: part of the training steps over which those blocks open, above 0 and at most 1.
        use_cache: return a cache outside training.
        bos_token_id, eos_token_id, pad_token_id: for generation.

    Raises:
        ValueError: for an unknown key, a value outside these rules, or a field that the chosen mixer does not have.
    """

    model_type = "proteus"

    mixer: str = "titans"
    vocab_size: int = 257
    hidden_size: int = 128
    num_hidden_layers: int = 2
    num_heads: int = 4
    head_dim: int = None  # pyright: ignore[reportAssignmentType] - filled in when the configuration is made
    value_expansion: int = None  # pyright: ignore[reportAssignmentType] - the mixer's own, if it has one
    intermediate_size: int = None  # pyright: ignore[reportAssignmentType] - likewise
    conv_size: int = 4
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    memory_blocks: int = 1
    memory_context: int = 8192
    memory_axis: str = "key"
    memory_policy: str = "uniform"
    memory_unlocks: tuple[int, ...] | None = None
    norm_order: str = "norm_then_mask"
    positions: str = "document"
    window: int | None = None
    swla_window: int = 2
    memory_depth: int = 2
    memory_expansion: int = 4
    memory_activation: str = "gelu_tanh"
    memory_residual_norm: bool = False
    chunk_size: int = 64
    read: str = "post"
    use_momentum: bool = True
    use_forgetting: bool = True
    decay_target: str = "zero"
    surprise_clip: float | None = None
    theta_scale: float = 1.0
    titans_variant: str = "lmm"
    persistent_tokens: int = 0
    segment_length: int = None  # pyright: ignore[reportAssignmentType] - of mac, filled in likewise
    mag_combine: str = "sigmoid_gate"
    inner_decay: str = "after_norm"
    output_correction: float = 1.0
    channel: str = "mlp"
    chain_periods: tuple[int, ...] = None  # pyright: ignore[reportAssignmentType] - of a chain, filled in likewise
    update_blocks: int = 1
    schedule_frac: float = 1.0
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_keys(kwargs)
        for name in ("mixer", "titans_variant", "hidden_size", "num_heads"):
            _check_value(name, getattr(self, name))
        if self.head_dim is None:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; give head_dim, or other sizes"
                )
            self.head_dim = self.hidden_size // self.num_heads
        if self.intermediate_size is None:
            self.intermediate_size = 64 * math.ceil(8 * self.hidden_size / 3 / 64)
        for name, value in self.mixer_class.defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.channel == "chain" and self.chain_periods is None:
            self.chain_periods = CHAIN_PERIODS
        if callable(self.memory_unlocks):
            _check_value("memory_blocks", self.memory_blocks)
            self.memory_unlocks = tuple(self.memory_unlocks(block) for block in range(self.memory_blocks))
        for name in ("chain_periods", "memory_unlocks"):  # lists, as JSON and YAML write them
            if isinstance(getattr(self, name), list):
                setattr(self, name, tuple(getattr(self, name)))
        super().__post_init__(**kwargs)
        self.check()

    @classmethod
    def default(cls, name: str) -> Any:
        """The default of a field."""
        return _defaults()[name]

    @property
    def mixer_class(self) -> type[Mixer]:
        """The class of the token mixer."""
        return titans_forms[self.titans_variant] if self.mixer == "titans" else registry[self.mixer]

    @property
    def schedule(self) -> ActivationSchedule:
        """When the blocks of memory open."""
        return ActivationSchedule(self.memory_blocks, self.memory_context, self.memory_unlocks)

    def shape(self) -> dict[str, Any]:
        """The fields that decide what a model computes, the schedule of its memory aside."""
        return {name: getattr(self, name) for name in _defaults() if name not in _NOT_SHAPE}

    @property
    def channels(self) -> int:
        """Residual MLP blocks of a layer: the levels of its chain, else one."""
        return len(self.chain_periods) if self.channel == "chain" else 1

    def check(self) -> None:
        """Raise ValueError for a value or a combination outside the rules; `ProteusForCausalLM` asks again, fields may be set."""
        _check_value("mixer", self.mixer)
        absent = set().union(*(kind.fields for kind in _kinds().values())) - self.mixer_class.fields
        here = f"mixer {self.mixer!r}" + (f" with titans_variant {self.titans_variant!r}" if self.mixer == "titans" else "")
        for name in _defaults():
            if name in absent:
                self._refuse(name, f"does not apply to {here}; mixers with it: {', '.join(_mixers_with(name))}")
            else:
                _check_value(name, getattr(self, name))
        for name in _INERT:
            value, default = getattr(self, name), getattr(_plain(), name)
            if value != default:
                raise ValueError(f"{name} is {value!r}, which would change nothing in a Proteus model; leave it at {default!r}")
        if self.memory_blocks == 1:
            for name in _NEED_BLOCKS:
                self._refuse(name, "changes nothing with memory_blocks 1, which is open always")
        self._check_policy()
        if self.channel != "chain":
            for name in _NEED_CHAIN:
                self._refuse(name, f"does not apply to channel {self.channel!r}; it is of channel 'chain'")
        else:
            if self.update_blocks == 1:
                self._refuse("schedule_frac", "changes nothing with update_blocks 1, all of which is updated always")
            check_chain(self)
        dim = self.mixer_class.memory_dim(self)
        if dim is not None and dim < self.memory_blocks:
            raise ValueError(
                f"memory_blocks is {self.memory_blocks} and the memory of mixer {self.mixer!r} has {dim} coordinates to open; "
                f"use at most {dim} blocks, or a larger memory"
            )
        self.mixer_class.validate(self)

    def _check_policy(self) -> None:
        """Raise ValueError unless unlock positions are given just where the policy asks for them, and follow the rules."""
        if self.memory_policy != "custom":
            self._refuse("memory_unlocks", f"does not apply to memory_policy {self.memory_policy!r}; it is of policy 'custom'")
            return
        if self.memory_unlocks is None:
            raise ValueError(
                f"memory_policy is 'custom' without memory_unlocks; give the {self.memory_blocks} positions at which the blocks "
                "open, the first 0, or use memory_policy 'uniform'"
            )
        try:
            _ = self.schedule
        except ValueError as error:
            raise ValueError(f"memory_unlocks: {error}") from error

    def _refuse(self, name: str, reason: str) -> None:
        value, default = getattr(self, name), self.default(name)
        if value != default:
            raise ValueError(f"{name} is {value!r}, but {name} {reason}; leave it at its default, {default!r}")

    @staticmethod
    def _check_keys(given: dict[str, Any]) -> None:
        """Raise ValueError for keys that no Hugging Face configuration knows."""
        for key in given:
            if key not in _inherited():
                close = difflib.get_close_matches(key, _defaults(), n=1, cutoff=0.0)
                raise ValueError(f"unknown field {key!r} in a ProteusConfig; the nearest is {close[0]!r}")


@cache
def _plain() -> PreTrainedConfig:
    return PreTrainedConfig()


@cache
def _inherited() -> frozenset[str]:
    """Keys that any Hugging Face configuration takes: written to its files, or handed on by `from_pretrained`."""
    extra = ("name_or_path", "_name_or_path", "_commit_hash", "attn_implementation", "torch_dtype", "auto_map", "output_attentions")
    return frozenset(extra) | {"model_type", "num_labels"} | set(_plain().to_dict())


@cache
def _defaults() -> dict[str, Any]:
    """ProteusConfig's own fields with their defaults."""
    own = ProteusConfig.__annotations__
    return {f.name: f.default for f in fields(ProteusConfig) if f.name in own and f.default is not MISSING}


@cache
def _kinds() -> dict[str, type[Mixer]]:
    """Every mixer, each form of Titans by itself."""
    return {**registry, **{f"titans ({form})": kind for form, kind in titans_forms.items() if kind is not registry["titans"]}}


def _mixers_with(name: str) -> list[str]:
    return [mixer for mixer, kind in _kinds().items() if name in kind.fields]


def _check_value(name: str, value: Any) -> None:
    """Raise ValueError when a field's value is not of its kind."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    number = (whole or isinstance(value, float)) and math.isfinite(value)
    rule = None
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            close = difflib.get_close_matches(str(value), _CHOICES[name], n=1)
            rule = f"one of {', '.join(_CHOICES[name])}" + (f" (did you mean {close[0]}?)" if close else "")
    elif name in _COUNTS:
        rule = None if whole and value >= 1 else "a whole number of at least 1"
    elif name in _OPTIONAL_COUNTS:
        rule = None if value is None or (whole and value >= 1) else "a whole number of at least 1, or None"
    elif name in _NOT_NEGATIVE_COUNTS:
        rule = None if whole and value >= 0 else "a whole number of at least 0"
    elif name in _TOKENS:
        several = name == "eos_token_id" and _ids(value)
        rule = None if value is None or (whole and value >= 0) or several else "a token id, or None"
    elif name in _POSITIVE:
        rule = None if number and value > 0 else "a number above 0"
    elif name in _OPTIONAL_POSITIVE:
        rule = None if value is None or (number and value > 0) else "a number above 0, or None"
    elif name in _NOT_NEGATIVE:
        rule = None if number and value >= 0 else "a number of at least 0"
    elif name == "schedule_frac":
        rule = None if number and 0 < value <= 1 else "a number above 0 and at most 1"
    elif name == "chain_periods":
        rule = None if value is None or _periods(value) else "a list of whole numbers of at least 1, or None"
    elif name == "memory_unlocks":
        rule = None if value is None or _positions(value) else "a list of whole numbers, the first 0, or None"
    elif name in _SWITCHES:
        rule = None if isinstance(value, bool) else "true or false"
    if rule is not None:
        raise ValueError(f"{name} is {value!r}; it must be {rule}")


def _ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, int) and v >= 0 for v in value)


def _positions(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)


def _periods(value: Any) -> bool:
    return _positions(value) and len(value) > 0 and min(value) >= 1
