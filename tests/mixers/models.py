"""Tiny models of every mixer, made from the registry, for tests of what must hold for all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from proteus_lm import ProteusConfig, ProteusForCausalLM
from proteus_lm.mixers import registry, titans_forms
from proteus_lm.mixers.state import map_state

VOCABULARY = 31
CONTEXT = 24
"""N of the scheduled models: with E = 4 blocks open at 0, 6, 12, 18, inside chunks of 4 tokens as well as at their borders."""


def options(mixer: str, **changes: Any) -> dict[str, Any]:
    """Fields of a tiny configuration; `memory_*` and the sizes of chunks, segments and windows only where the mixer has them."""
    form = changes.get("titans_variant")
    fields = registry[mixer].fields if form is None else titans_forms[form].fields
    small: dict[str, Any] = {"chunk_size": 4, "memory_expansion": 2}
    if form is not None:
        small |= {"segment_length": 8, "window": 5}
    base = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 8}
    return {**base, "intermediate_size": 24, "mixer": mixer, **{k: v for k, v in small.items() if k in fields}, **changes}


def cases() -> list[Any]:
    """Every mixer x {one block, four blocks along each axis it has}, read before the write, with a window; Hope-Attention.

    The forms of Titans without persistent tokens and one block, and with both; two of them clipped, and decaying to their start;
    one that is residual with a norm; gated memories.
    """
    found = {}
    for name, mixer in registry.items():
        found[f"{name}-E1"] = options(name)
        if "window" in mixer.fields:
            found[f"{name}-window"] = options(name, window=5)
        if "swla_window" in mixer.fields:  # longer than what the convolution sees, and than a chunk
            found[f"{name}-c5"] = options(name, swla_window=5, memory_blocks=4, memory_context=CONTEXT)
        if "memory_blocks" in mixer.fields:
            for axis in ("key", "value") if "memory_axis" in mixer.fields else ("key",):
                found[f"{name}-E4-{axis}"] = options(name, memory_blocks=4, memory_context=CONTEXT, memory_axis=axis)
        if "read" in mixer.fields:
            found[f"{name}-pre-E4"] = options(name, memory_blocks=4, memory_context=CONTEXT, read="pre")
    scheduled = {"memory_blocks": 4, "memory_context": CONTEXT, "persistent_tokens": 3}
    for form in titans_forms:
        if form != "lmm":
            found[f"titans-{form}-E1"] = options("titans", titans_variant=form)
        found[f"titans-{form}-persistent-E4"] = options("titans", titans_variant=form, **scheduled)
    update = {"surprise_clip": 0.3, "decay_target": "init"}
    for form in ("lmm", "mac"):
        found[f"titans-{form}-clip-init-E4"] = options("titans", titans_variant=form, **update, **scheduled)
    for form, depth in (("lmm", 3), ("mac", 2), ("mag", 2)):
        gated = {"memory_activation": "swiglu", "memory_depth": depth}
        found[f"titans-{form}-swiglu-depth{depth}-E4"] = options("titans", titans_variant=form, **gated, **scheduled)
    found["titans-mac-norm-E4"] = options("titans", titans_variant="mac", memory_residual_norm=True, **scheduled)
    found["attention-chain"] = options("attention", channel="chain", chain_periods=[1, 3])
    return [pytest.param(fields, id=name) for name, fields in found.items()]


def scheduled_cases() -> list[Any]:
    """Those of `cases` with more than one block."""
    return [case for case in cases() if case.values[0].get("memory_blocks", 1) > 1]


def make(fields: dict[str, Any], dtype: torch.dtype = torch.float64, seed: int = 0) -> ProteusForCausalLM:
    """A model in evaluation mode whose layers matter: initial weights are so small that a mistake could hide behind rounding."""
    torch.manual_seed(seed)
    model = ProteusForCausalLM(ProteusConfig(**fields)).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                module.weight.mul_(10)
    return model.to(dtype)


def tokens(rows: int, length: int, seed: int = 1) -> Tensor:
    """Random ids int64 (rows, length)."""
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def tensors(state: Any) -> list[Tensor]:
    """The tensors of a state, in order."""
    found: list[Tensor] = []
    map_state(lambda x: found.append(x) or x, state)
    return found


def assert_near(got: Tensor, wanted: Tensor, tolerance: float | None = None) -> None:
    """Root mean square of the difference, relative to `wanted`'s: design.md's tolerances, 1e-10 in fp64 and 1e-5 in fp32."""
    assert got.shape == wanted.shape
    if not wanted.numel():  # a state without a convolution
        return
    tolerance = tolerance or (1e-10 if wanted.dtype == torch.float64 else 1e-5)
    scale = wanted.double().square().mean().sqrt().clamp(min=1e-3)
    error = (got.double() - wanted.double()).square().mean().sqrt() / scale
    assert error <= tolerance, f"relative error {error:.2e} above {tolerance:.0e}"


def assert_states_near(got: Any, wanted: Any, tolerance: float | None = None) -> None:
    """`assert_near` over every tensor of two caches' states, and equal positions."""
    assert torch.equal(got.position, wanted.position)
    for one, other in zip(tensors(tuple(got.states)), tensors(tuple(wanted.states)), strict=True):
        assert_near(one, other, tolerance)


def train_finitely(fields, steps, length):
    """Train on a repeating text with a large step size; losses finite and lower at the end."""
    model = make(fields, torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        ids = tokens(4, length, seed=step % 5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss
        update(model, optimizer, loss, step)
        losses.append(loss.item())
    assert sum(losses[-5:]) < sum(losses[:5])


def update(model, optimizer, loss, step):
    """One step of training, clipped; the loss and the gradients are finite."""
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert loss.isfinite() and norm.isfinite(), f"step {step}: loss {loss}, gradient norm {norm}"
    optimizer.step()
