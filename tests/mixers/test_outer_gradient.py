"""The outer gradient through Titans' inner updates: of a whole model, against finite differences, over three inner chunks."""

from __future__ import annotations

import pytest
import torch

from proteus_lm.mixers import titans_forms
from tests.mixers.models import make, options, tokens

CHUNK = 4
LENGTH = 3 * CHUNK + 2  # three whole chunks, and part of a fourth that reads what all three wrote
STEP = 1e-5
TOLERANCE = 1e-6
"""Of the parameter's own gradient. Central differences are off by STEP^2 times a third derivative: about 1e-8 where it is 100."""
ROUNDING = 1e-10
"""Of the largest gradient, for parameters that hardly matter: fp64 rounds a loss of this size by 1e-16 / STEP of it."""

SCHEDULED = {"memory_blocks": 4, "memory_context": 12}  # blocks open at 0, 3, 6, 9: inside chunks
CASES = {f"{form}-E4": {"titans_variant": form, **SCHEDULED} for form in titans_forms}
CASES |= {f"{form}-E1": {"titans_variant": form} for form in titans_forms}
CASES |= {f"lmm-depth{depth}-E4": {"memory_depth": depth, **SCHEDULED} for depth in (3, 4)}
CASES |= {
    "lmm-depth1-E4": {"memory_depth": 1, "memory_expansion": 4, **SCHEDULED},
    "lmm-pre-E4": {"read": "pre", **SCHEDULED},
    "lmm-persistent": {"persistent_tokens": 3},
    "mac-persistent-E4": {"titans_variant": "mac", "persistent_tokens": 3, **SCHEDULED},
    "lmm-init-E4": {"decay_target": "init", "persistent_tokens": 3, **SCHEDULED},
    "lmm-norm-E4": {"memory_residual_norm": True, **SCHEDULED},
    "mac-norm-init-E4": {"titans_variant": "mac", "memory_residual_norm": True, "decay_target": "init", **SCHEDULED},
    "mac-init-E4": {"titans_variant": "mac", "decay_target": "init", **SCHEDULED},
    "lmm-ttt": {"use_momentum": False, "use_forgetting": False},
    "lmm-swiglu-E4": {"memory_activation": "swiglu", **SCHEDULED},
    "lmm-swiglu-depth3-norm-init-E4": {
        "memory_activation": "swiglu",
        "memory_depth": 3,
        "memory_residual_norm": True,
        "decay_target": "init",
        **SCHEDULED,
    },
    "mac-swiglu-E4": {"titans_variant": "mac", "memory_activation": "swiglu", **SCHEDULED},
    "mal-swiglu-E4": {"titans_variant": "mal", "memory_activation": "swiglu", **SCHEDULED},
}
WHOLE, PIECES = [LENGTH], [5, 1, 8]
RUNS = [pytest.param(fields, WHOLE, id=name) for name, fields in CASES.items()]
RUNS += [pytest.param(CASES[f"{form}-E4"], PIECES, id=f"{form}-E4-in pieces") for form in titans_forms]
RUNS += [pytest.param(CASES["lmm-swiglu-E4"], PIECES, id="lmm-swiglu-E4-in pieces")]


@pytest.mark.parametrize(("changes", "pieces"), RUNS)
def test_the_outer_gradient_equals_finite_differences_across_three_chunks(changes, pieces):
    """Along a random direction of each parameter; in pieces the gradient goes through the states and the decoding step."""
    model, ids = make(options("titans", num_hidden_layers=1, **changes)), tokens(2, LENGTH)
    weights = torch.randn(2, LENGTH, 31, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def loss():
        cache, parts = None, []
        for part in ids.split(pieces, 1):
            out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
        return (torch.cat(parts, 1) * weights).sum()

    named = dict(model.named_parameters())
    grads = dict(zip(named, torch.autograd.grad(loss(), list(named.values())), strict=True))
    whole = max(grad.norm().item() for grad in grads.values())
    generator = torch.Generator().manual_seed(4)
    for name, parameter in named.items():
        direction = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        direction /= direction.norm()
        with torch.no_grad():
            parameter += STEP * direction
            ahead = loss().item()
            parameter -= 2 * STEP * direction
            behind = loss().item()
            parameter += STEP * direction
        slope = (ahead - behind) / (2 * STEP)
        got = (grads[name] * direction).sum().item()
        allowed = TOLERANCE * grads[name].norm().item() + ROUNDING * whole
        assert abs(got - slope) <= allowed, f"{name}: {got} by autograd, {slope} by differences, {allowed} allowed"
