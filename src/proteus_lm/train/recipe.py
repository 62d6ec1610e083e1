"""A recipe: the YAML file that says everything about a run, read strictly.

Three sections: `model` (fields of ProteusConfig; with `preset`, those of a named size where they are left out), `data` and `train`
(the dataclasses below). A key nobody knows, a value of the
wrong type and a value outside its rule are errors that name the section, the key and the remedy: nothing is ignored in silence.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

SECTIONS = ("model", "data", "train")


class RecipeError(ValueError):
    """A recipe that cannot be followed: the message names the section, the key, the value, the rule and the remedy."""


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """What is read.

    Args:
        path: a folder that `proteus prepare` wrote; a relative one is looked for from the working folder.
        context: T, tokens in a window (inputs; the loader adds the last target).
        allow_short_documents: accept data none of whose documents fills a window (windows then hold several documents).
    """

    path: str
    context: int
    allow_short_documents: bool = False

    def __post_init__(self) -> None:
        _rule("data.context", self.context, self.context >= 1, "at least 1 token")
        _rule("data.path", self.path, bool(self.path), "the folder that `proteus prepare` wrote")


@dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """How it is learnt.

    Args:
        steps: optimiser steps in all; the learning-rate schedule ends there.
        batch_size: rows (windows) an optimiser step, over all processes.
        micro_batch_size: rows in one forward pass of one process, gradients are summed until the step is whole; None = all at once.
        lr: peak learning rate. min_lr_ratio: the last step's learning rate as a part of it (cosine only).
        warmup: steps of linear warm-up. schedule: cosine | constant, after the warm-up.
        betas, eps, weight_decay: of AdamW; decay is decoupled and only for the group `proteus_lm.train.optimizer` names.
        decay_locked, bias_correction: of the gated optimiser that a model with `update_blocks` has: decay units not yet open too;
            correct by a "block"'s own updates or by "global" steps (`proteus_lm.optim.GatedAdamW`).
        clip: largest global norm of the gradient; None = no clipping.
        seed: of the initial weights and of the order of the data.
        precision: fp32, or bf16 = bf16 autocast over fp32 weights, gradients and moments.
        device: auto (CUDA where there is one) | cpu | cuda.
        threads: CPU threads of PyTorch, part of what makes a run repeat bit for bit; None = leave as it is.
        deterministic: ask PyTorch for deterministic algorithms; None = on the CPU yes, on CUDA no.
        validate_every, save_every: steps between two of them; None = after the last step only.
        validate_tokens: tokens of the validation split to predict, spread evenly over it; 0 = never validate.
        keep: newest checkpoints that stay. log_every: steps between two lines on the console and two probes of the memory.
        tensorboard: also write RUN/tensorboard. wandb: also log to this project of Weights & Biases (extra `wandb`).
        compile: torch.compile the forward and backward pass.
        cuda_graph: capture forward and backward of a micro-batch once and replay it, for models bound by launches (MAC).
        wave: pieces that a window is cut into, so that on a GPU a layer works on one while the layer below is at the next
            (`proteus_lm.wave`; for MAC, with cuda_graph); 0 or 1 = none.
        skip_nonfinite: on a non-finite loss or gradient leave the update out, count and report it, and go on (the schedule and the
            data advance); False = stop before the update with the batch saved.
        gradient_checkpointing: recompute each layer in the backward pass to save memory.
    """

    steps: int
    batch_size: int = 8
    micro_batch_size: int | None = None
    lr: float = 1e-3
    min_lr_ratio: float = 0.1
    warmup: int = 0
    schedule: Literal["cosine", "constant"] = "cosine"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_locked: bool = False
    bias_correction: Literal["block", "global"] = "block"
    clip: float | None = 1.0
    seed: int = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    deterministic: bool | None = None
    validate_every: int | None = None
    validate_tokens: int = 65536
    save_every: int | None = None
    keep: int = 2
    log_every: int = 10
    tensorboard: bool = True
    wandb: str | None = None
    compile: bool = False
    cuda_graph: bool = False
    wave: int = 0
    skip_nonfinite: bool = False
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "keep", "log_every"):
            _rule(f"train.{name}", getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("micro_batch_size", "threads", "validate_every", "save_every"):
            value = getattr(self, name)
            _rule(f"train.{name}", value, value is None or value >= 1, "at least 1, or null")
        for name in ("warmup", "validate_tokens", "weight_decay", "wave"):
            _rule(f"train.{name}", getattr(self, name), getattr(self, name) >= 0, "0 or more")
        _rule("train.seed", self.seed, 0 <= self.seed < 2**64, "0 to 2**64 - 1")
        for name in ("lr", "eps"):
            _rule(f"train.{name}", getattr(self, name), getattr(self, name) > 0, "greater than 0")
        _rule("train.clip", self.clip, self.clip is None or self.clip > 0, "greater than 0, or null for no clipping")
        _rule("train.min_lr_ratio", self.min_lr_ratio, 0 <= self.min_lr_ratio <= 1, "between 0 and 1")
        _rule("train.betas", list(self.betas), all(0 <= beta < 1 for beta in self.betas), "two numbers, from 0 to below 1")
        _rule("train.warmup", self.warmup, self.warmup <= self.steps, f"at most the {self.steps} steps of the run")
        micro = self.micro_batch_size or self.batch_size
        rule = f"a divisor of train.batch_size ({self.batch_size})"
        _rule("train.micro_batch_size", micro, self.batch_size % micro == 0, rule)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run: `model` holds fields of ProteusConfig by name (those left out take its defaults)."""

    data: DataRecipe
    train: TrainRecipe
    model: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain lists, dicts and numbers, as YAML writes them: {"model": ..., "data": ..., "train": ...}."""
        train = dataclasses.asdict(self.train)
        train["betas"] = list(self.train.betas)
        return {"model": dict(self.model), "data": dataclasses.asdict(self.data), "train": train}

    def save(self, path: str | Path) -> None:
        """Write the recipe as YAML that `load_recipe` reads back to an equal one; atomic."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")
        temporary.replace(path)


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file and change single values of it.

    Args:
        path: YAML with the sections model, data, train.
        overrides: "section.key=value" each, the value written as YAML ("train.lr=1e-3", "model.memory_unlocks=[0, 64]"); a key
            given twice is an error, as in the file.

    Raises:
        FileNotFoundError: when there is no such file.
        RecipeError: for anything in it that is unknown, of the wrong type or outside its rule.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no recipe at {path}; give a YAML file such as recipes/demo-titans-e8.yaml")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not readable YAML: {error}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path} holds {_kind(content)}; it must hold the sections {', '.join(SECTIONS)}")
    sections: dict[str, dict[str, Any]] = {}
    for name, values in content.items():
        _known(name, SECTIONS, "section", str(path))
        if not isinstance(values, dict | None):
            raise RecipeError(f"section {name} of {path} holds {_kind(values)}; it must hold lines of `key: value`")
        sections[name] = dict(values or {})
    given: set[str] = set()
    for override in overrides:
        _override(sections, override, given)
    return make_recipe(sections)


def make_recipe(sections: Mapping[str, Mapping[str, Any]]) -> Recipe:
    """The checked recipe of plain sections {"model": {...}, "data": {...}, "train": {...}}.

    The schedule of the memory follows the training context: `model.memory_context` is `data.context` where it is not given. A
    `model.preset` is replaced by the fields it stands for (`proteus_lm.presets`), so that a saved recipe does not depend on them.

    Raises:
        RecipeError: as `load_recipe`.
    """
    for name in sections:
        _known(name, SECTIONS, "section", "the recipe")
    data = _section(DataRecipe, "data", sections.get("data", {}))
    train = _section(TrainRecipe, "train", sections.get("train", {}))
    model = _model_section(dict(sections.get("model", {})), data.context)
    if model.get("update_blocks", 1) == 1:
        for name in ("decay_locked", "bias_correction"):
            value, default = getattr(train, name), getattr(TrainRecipe, name)
            _rule(f"train.{name}", value, value == default, f"left out ({default!r}): the model has no update_blocks")
    _check_wave(model, data.context, train)
    return Recipe(model=model, data=data, train=train)


def model_fields() -> tuple[str, ...]:
    """Names a recipe's model section may use: the fields of ProteusConfig itself, not those every Hugging Face config has."""
    from proteus_lm.config import ProteusConfig

    own = ProteusConfig.__annotations__
    return tuple(f.name for f in dataclasses.fields(ProteusConfig) if f.name in own)


def _model_section(model: dict[str, Any], context: int) -> dict[str, Any]:
    from proteus_lm.config import ProteusConfig

    for key in model:
        _known(key, (*model_fields(), "preset"), "key", "section model")
    model.setdefault("memory_context", context)
    try:
        if "preset" in model:
            model = _preset(**model)
        config = ProteusConfig(**model)
    except (ValueError, TypeError) as error:
        raise RecipeError(f"section model: {error}") from error
    if config.memory_blocks > 1 and config.memory_context > context:
        raise RecipeError(
            f"model.memory_context is {config.memory_context} and data.context is {context}: the last blocks of memory would never "
            f"open in training; leave memory_context out (it is then {context}) or train with a longer context"
        )
    return model


def _check_wave(model: dict[str, Any], context: int, train: TrainRecipe) -> None:
    """Raise RecipeError for a wave that would not run, or whose pieces would cut a segment or an inner chunk of the memory."""
    from proteus_lm.config import ProteusConfig

    if train.wave < 2:
        return
    config = ProteusConfig(**model)
    if config.positions == "document":
        raise RecipeError(
            f"train.wave is {train.wave} with model.positions 'document', whose packed documents are not cut into pieces; use "
            "model.positions=window or train.wave=0"
        )
    if train.gradient_checkpointing:
        raise RecipeError(
            f"train.wave is {train.wave} with train.gradient_checkpointing, which would run each layer's pieces again one after "
            "the other; use one of them"
        )
    name = next((n for n in ("segment_length", "chunk_size") if n in config.mixer_class.fields), None)
    whole = 1 if name is None else getattr(config, name)
    if context % (train.wave * whole) or context < 2 * train.wave:
        most = max((n for n in range(2, train.wave) if context % (n * whole) == 0), default=0)
        of = "two tokens or more" if name is None else f"whole multiples of model.{name} ({whole})"
        raise RecipeError(
            f"train.wave is {train.wave} with data.context {context}: its pieces must be of one length, {of}; use "
            f"train.wave={most}, or a data.context that is a multiple of {train.wave * max(whole, 2)}"
        )


def _preset(*, preset: Any, mixer: Any = None, **fields: Any) -> dict[str, Any]:
    from proteus_lm.presets import preset_fields

    if mixer is None:
        raise ValueError(f"preset {preset!r} needs a mixer beside it, such as mixer: titans")
    return preset_fields(preset, mixer, **fields)


def _section(kind: type, name: str, values: Mapping[str, Any]) -> Any:
    """An instance of a section's dataclass, each key known and each value of its type."""
    hints = get_type_hints(kind)
    for key in values:
        _known(key, tuple(hints), "key", f"section {name}")
    for item in dataclasses.fields(kind):
        if item.default is dataclasses.MISSING and item.name not in values:
            raise RecipeError(f"section {name} lacks {item.name}; give it in the recipe or as --set {name}.{item.name}=...")
    return kind(**{key: _typed(f"{name}.{key}", value, hints[key]) for key, value in values.items()})


def _typed(where: str, value: Any, hint: Any) -> Any:
    """`value` as `hint` asks: whole numbers stand for floats, lists for tuples; nothing else is converted."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        if value is None and type(None) in arguments:
            return None
        return _typed(where, value, next(a for a in arguments if a is not type(None)))
    if origin is Literal:
        if value in arguments and isinstance(value, str):
            return value
        close = difflib.get_close_matches(str(value), arguments, n=1)
        hint_text = f"; did you mean {close[0]}?" if close else ""
        raise RecipeError(f"{where} is {value!r}; it must be one of {', '.join(arguments)}{hint_text}")
    if origin is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(arguments):
            raise RecipeError(f"{where} is {value!r}; it must be a list of {len(arguments)} numbers")
        return tuple(_typed(where, v, a) for v, a in zip(value, arguments))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        name = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]
        raise RecipeError(f"{where} is {value!r} ({_kind(value)}); it must be {name}")
    if hint is float and not math.isfinite(value):
        raise RecipeError(f"{where} is {value!r}; it must be a finite number")
    return value


def _override(sections: dict[str, dict[str, Any]], text: str, given: set[str]) -> None:
    """Set one field; `given` holds the keys set before, and gets this one."""
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot or not name:
        raise RecipeError(f"--set {text!r} is not of the form section.key=value, such as train.lr=1e-3")
    _known(section, SECTIONS, "section", f"--set {text}")
    if key.strip() in given:
        raise RecipeError(f"--set gives {key.strip()} twice, the second time as {value!r}; give it once")
    given.add(key.strip())
    try:
        sections.setdefault(section, {})[name] = yaml.load(value, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise RecipeError(f"--set {text!r}: {value!r} is not readable YAML: {error}") from error


def _known(name: Any, right: Iterable[str], kind: str, where: str) -> None:
    """Raise for a name that is not among the right ones, with the nearest of them."""
    right = tuple(right)
    if name in right:
        return
    close = difflib.get_close_matches(str(name), right, n=1, cutoff=0.5)
    remedy = f"did you mean {close[0]}?" if close else f"known: {', '.join(right)}"
    raise RecipeError(f"unknown {kind} {name!r} in {where}; {remedy}")


def _rule(where: str, value: Any, holds: bool, rule: str) -> None:
    if not holds:
        raise RecipeError(f"{where} is {value!r}; it must be {rule}")


def _kind(value: Any) -> str:
    return {dict: "a mapping", list: "a list", str: "text", type(None): "nothing"}.get(type(value), type(value).__name__)


class _StrictLoader(yaml.SafeLoader):
    """The safe loader, but 4e-4 is a number (YAML 1.1 wants 4.0e-4 and reads text) and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # the safe loader has its own error for this
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)
