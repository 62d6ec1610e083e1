"""`attach` and `detach`: gates on every layer of a model that can take one, and the set-up in the model's config."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from proteus_lm.attach.gate import LayerGate
from proteus_lm.attach.layers import Layer, forward_of, layer_of, normalises, why_not
from proteus_lm.schedule import ActivationSchedule

AXES = ("key", "value")
NORM_ORDERS = ("norm_then_mask", "mask_then_norm")
_FIELD = "proteus"  # of the model's config
_GATE = "proteus_gate"  # of a layer

Model = TypeVar("Model", bound=nn.Module)


def attach(
    model: Model, blocks: int | None = None, context: int | None = None, *, axis: str = "key", norm_order: str = "norm_then_mask"
) -> Model:
    """Open the memories of a model from elsewhere block by block (Proteus eq 7-13, masks as in spec/linear.md 2.3).

    Gates the gated delta rule layers of transformers and the Comba, DeltaNet, GatedDeltaNet, GLA and RetNet layers of
    flash-linear-attention; other layers (the softmax attention of a hybrid) stay as they are. `blocks` = 1 touches nothing.
    The set-up is written to `model.config.proteus` and saved with the model. transformers cannot call us when it loads a model:
    after loading, `attach(model)` without numbers restores it.

    Args:
        model: a transformers or fla model, or any module holding such layers (without a config it keeps no set-up). Attach
            before `torch.compile`.
        blocks: E, blocks of every layer's memory.
        context: N, tokens after which all blocks are open (the training context).
        axis: "key" opens rows of the state (keys), "value" its columns (values).
        norm_order: "norm_then_mask" masks normalised keys; "mask_then_norm" normalises the open part alone (spec/linear.md 2.7).

    Returns:
        The same model.

    Raises:
        ValueError: for numbers out of range, a set-up other than the one saved, nothing to restore, a model already attached,
            compiled, or with layers that this set-up cannot gate; nothing is changed then.
    """
    setup = _setup(model, blocks, context, axis, norm_order)
    layers = _gateable(model)
    schedule = ActivationSchedule(setup["blocks"], setup["context"])
    gates = [(module, _gate(name, module, layer, schedule, setup)) for name, module, layer in layers]
    if setup["blocks"] > 1:
        for module, gate in gates:
            gate.install(module)
            setattr(module, _GATE, gate)
    if hasattr(model, "config"):
        setattr(model.config, _FIELD, setup)
    return model


def detach(model: Model) -> Model:
    """Take the gates off and the set-up out of the config: the model then computes what it did before, to the bit.

    Raises:
        ValueError: when there is nothing to take off, or the model is compiled.
    """
    _check_not_compiled(model)
    gated = [module for module in model.modules() if hasattr(module, _GATE)]
    saved = saved_setup(model)
    if not gated and saved is None:
        raise ValueError("this model has no gate and no saved set-up (config.proteus); there is nothing to detach")
    for module in gated:
        getattr(module, _GATE).remove()
        delattr(module, _GATE)
    if saved is not None:
        delattr(model.config, _FIELD)
    return model


def saved_setup(model: Any) -> dict[str, Any] | None:
    """The set-up that `attach` left in a model's config, in place or to be restored; None where there is none."""
    return getattr(getattr(model, "config", None), _FIELD, None)


def _setup(model: nn.Module, blocks: int | None, context: int | None, axis: str, norm_order: str) -> dict[str, Any]:
    """The set-up to put in place, checked against the one saved with the model."""
    saved = saved_setup(model)
    if blocks is None and context is None:
        if saved is None:
            raise ValueError("the model's config holds no set-up to restore (config.proteus); give attach(model, blocks, context)")
        if not isinstance(saved, dict) or set(saved) != {"blocks", "context", "axis", "norm_order"}:
            raise ValueError(f"config.proteus is {saved!r}; it must hold blocks, context, axis and norm_order, and nothing else")
        setup = dict(saved)
    elif blocks is None or context is None:
        raise ValueError(f"blocks is {blocks} and context is {context}; give both, or neither to restore what the model saved")
    else:
        setup = {"blocks": blocks, "context": context, "axis": axis, "norm_order": norm_order}
        if saved is not None and saved != setup:
            raise ValueError(
                f"the model was saved with {saved}, and this call says {setup}; attach(model) restores the saved set-up, "
                f"detach(model) forgets it"
            )
    for field, known in (("axis", AXES), ("norm_order", NORM_ORDERS)):
        if setup[field] not in known:
            raise ValueError(f"{field} is {setup[field]!r}; it must be one of {', '.join(known)}")
    if setup["axis"] == "value" and setup["norm_order"] == "mask_then_norm":
        raise ValueError("norm_order='mask_then_norm' is about keys; axis='value' masks none, leave it at 'norm_then_mask'")
    return setup


def _gateable(model: nn.Module) -> list[tuple[str, nn.Module, Layer]]:
    """Name, module and kind of every layer to gate. Raises ValueError where the model as a whole cannot be."""
    _check_not_compiled(model)
    if getattr(getattr(model, "config", None), "model_type", None) == "proteus":
        raise ValueError("this is a Proteus model, with the schedule built in: set memory_blocks and memory_context in its config")
    found = [(name, module, layer) for name, module in model.named_modules() if (layer := layer_of(module)) is not None]
    if not found:
        raise ValueError(why_not(model))
    attached = [name for name, module, _ in found if hasattr(module, _GATE)]
    if attached:
        raise ValueError(f"already attached ({attached[0]} has a gate); call detach(model) first")
    return found


def _check_not_compiled(model: nn.Module) -> None:
    if hasattr(model, "_orig_mod") or any(m._compiled_call_impl is not None for m in model.modules()):
        raise ValueError("the model is compiled, and compiled code does not see hooks that change; attach or detach, then compile")


def _gate(name: str, module: nn.Module, layer: Layer, schedule: ActivationSchedule, setup: dict[str, Any]) -> LayerGate:
    """The gate of one layer. Raises ValueError where this layer cannot take it."""
    kind, axis, norm_order = type(module).__name__, setup["axis"], setup["norm_order"]
    forward = forward_of(module)
    absent = [rule for rule in layer.rules if rule not in forward.__code__.co_names or rule not in forward.__globals__]
    if absent:
        raise ValueError(
            f"{name} ({kind}) does not call {', '.join(absent)} by name in its module, where the gate stands: this version of "
            f"{forward.__module__.split('.')[0]} is not one that attach knows (transformers 5.17 or later, fla 0.6)"
        )
    dim = getattr(module, layer.key_dim if axis == "key" else layer.value_dim)
    if dim < schedule.blocks:
        raise ValueError(f"{name} ({kind}) has {dim} {axis} coordinates, fewer than {schedule.blocks} blocks; use at most {dim}")
    if norm_order == "mask_then_norm" and not normalises(module, layer):
        raise ValueError(f"{name} ({kind}) does not normalise keys in its rule, which norm_order='mask_then_norm' needs")
    paired = layer.rotary and axis == "key"
    if paired and schedule.blocks > 1 and (dim % 2 or dim // schedule.blocks % 2):
        raise ValueError(
            f"{name} ({kind}) turns keys in rotary pairs, and blocks of {dim // schedule.blocks} of {dim} coordinates cut a pair; "
            f"use blocks of an even size, or axis='value'"
        )
    halves = paired and not getattr(module.rotary, "interleaved", False)  # pairs (i, i + K/2), or neighbours already
    return LayerGate(name, layer, dim, schedule, axis, norm_order, halves)
