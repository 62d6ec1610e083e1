"""The door of `GatedAdamW` for any model: which parameters of its MLP blocks open by blocks, found by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn
from transformers.pytorch_utils import Conv1D

from proteus_lm.optim import Gate
from proteus_lm.schedule import ActivationSchedule

# Maps into the hidden units, and out of them, by the names models give them.
_IN = ("gate_proj", "up_proj", "w1", "w3", "dense_h_to_4h", "c_fc", "fc1", "fc_in", "wi", "wi_0", "wi_1")
_OUT = ("down_proj", "w2", "dense_4h_to_h", "c_proj", "fc2", "fc_out", "wo")
_FUSED = ("gate_up_proj", "gate_up")


def gate_mlp(model: nn.Module, patterns: str | Sequence[str], blocks: int, steps: int) -> dict[nn.Parameter, Gate]:
    """Masks for `GatedAdamW` that open the hidden units of a model's MLP blocks over training steps (Proteus eq 14-15).

    A hidden unit is a row of the maps into it with its biases, and a column of the map out of it (`nn.Linear`; the other way
    round in GPT-2's `Conv1D`); the bias after the map out belongs to no unit. Known are Llama's gate_proj, up_proj, down_proj,
    GPT-NeoX's dense_h_to_4h, dense_4h_to_h, GPT-2's c_fc, c_proj, and fc1, fc2; fc_in, fc_out; w1, w2, w3; wi, wo.

    Args:
        model: any module.
        patterns: of names as in `named_modules()` or `named_parameters()`, by the rules of `fnmatch` (`*` also matches dots). An
            MLP block named stands for all its maps, a map for its weight and bias, a parameter for itself.
        blocks: E. One block gates nothing.
        steps: N, optimiser steps after which all units are open.

    Returns:
        Parameter -> (dimension of the hidden units, schedule over steps).

    Raises:
        ValueError: when a pattern matches nothing, or something with parameters that is not an MLP's map into or out of its hidden
            units; for fused or quantised maps; when there are more blocks than hidden units; for fewer steps than one.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"steps is {steps!r}; it must be a whole number of optimiser steps, at least 1")
    schedule = ActivationSchedule(blocks, steps)
    known = _hidden_dimensions(model)
    masks: dict[nn.Parameter, Gate] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        seen = False
        for name, parameter in _matches(model, pattern):
            if name not in known:
                raise ValueError(_stranger(model, pattern, name))
            dim = known[name]
            if dim is None:
                continue
            if parameter.shape[dim] < blocks:
                raise ValueError(f"{name} has {parameter.shape[dim]} hidden units, fewer than {blocks} blocks; use fewer blocks")
            masks[parameter] = (dim, schedule)
            seen = True
        if not seen:
            raise ValueError(f"{pattern!r} matches no parameter with hidden units; MLP blocks here: {_examples(model)}")
    return masks


def _blocks(model: nn.Module) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """MLP blocks: name, and maps by name. A block is a module that holds maps into hidden units and one map out of them."""
    for name, module in model.named_modules():
        maps = {n: m for n, m in module.named_children() if n in (*_IN, *_OUT)}
        if any(n in _IN for n in maps) and sum(n in _OUT for n in maps) == 1:
            yield name, maps


def _hidden_dimensions(model: nn.Module) -> dict[str, int | None]:
    """Parameter name -> dimension of the hidden units, for the maps of MLP blocks; None for the bias after the map out."""
    found: dict[str, int | None] = {}
    for block, maps in _blocks(model):
        for name, linear in maps.items():
            prefix, into = f"{block}.{name}" if block else name, name in _IN
            turned = isinstance(linear, Conv1D)  # its weight is (in, out)
            if turned or type(linear) is nn.Linear:
                found[f"{prefix}.weight"] = int(into == turned)
                found[f"{prefix}.bias"] = 0 if into else None
    return found


def _matches(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters whose own name, or that of a module around them, matches."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        if any(fnmatchcase(".".join(parts[:i]), pattern) for i in range(1, len(parts) + 1)):
            yield name, parameter


def _stranger(model: nn.Module, pattern: str, name: str) -> str:
    """Why a matched parameter cannot be gated."""
    owner = name.rpartition(".")[0]
    block, _, leaf = owner.rpartition(".")
    head = f"{pattern!r} matches {name} of {type(model.get_submodule(owner)).__name__}, "
    if any(part in _FUSED for part in name.split(".")):
        return head + "which holds two maps in one tensor: the units of a block do not lie side by side in it"
    if leaf in dict(_blocks(model)).get(block, ()):
        return head + "which is not a plain nn.Linear or Conv1D (quantised, or with an adapter); gate the base model's"
    return head + f"which no MLP block holds as a map into or out of hidden units; MLP blocks here: {_examples(model)}"


def _examples(model: nn.Module) -> str:
    names = [name for name, _ in _blocks(model)]
    return ", ".join(names[:3]) + (", ..." if names[3:] else "") if names else "none that is known"
