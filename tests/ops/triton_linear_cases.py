"""Cases of the Triton kernels, and a program that measures them all: `TRITON_INTERPRET=1 python triton_linear_cases.py`."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from proteus_lm import ActivationSchedule
from proteus_lm.ops.state import SWLAState

NAMES = {
    "retention": "q k v g",
    "swla": "q k v g gamma",
    "delta_rule": "q k v beta",
    "gated_delta_rule": "q k v g beta",
    "comba": "q k v p g beta",
}
# T around the chunk of 64, unlocks inside a tile and a chunk, both axes, states carried in, rows at their own offsets, documents.
SHAPES: dict[str, dict[str, Any]] = {
    "one token": {"size": (1, 1, 1, 16, 16), "initial": True},
    "63 tokens, odd sizes": {"size": (1, 63, 1, 48, 80)},
    "64 tokens, strong decay": {"size": (1, 64, 1, 16, 16), "decay": 50.0},
    "65 tokens, unlocks in a tile, keys": {"size": (1, 65, 2, 24, 16), "blocks": 6, "context": 60, "axis": "key"},
    "130 tokens, keys": {"size": (1, 130, 1, 64, 16), "blocks": 4, "context": 128, "axis": "key"},
    "130 tokens, values, strong decay": {
        "size": (1, 130, 1, 16, 96),
        "blocks": 8,
        "context": 128,
        "axis": "value",
        "decay": 50.0,
    },
    "state and offsets, keys": {
        "size": (2, 40, 1, 32, 16),
        "blocks": 5,
        "context": 50,
        "axis": "key",
        "initial": True,
        "offset": [0, 33],
    },
    "state and offsets, values": {
        "size": (2, 40, 1, 16, 32),
        "blocks": 5,
        "context": 50,
        "axis": "value",
        "initial": True,
        "offset": [0, 33],
    },
    "documents, keys": {"size": (1, 80, 1, 16, 16), "blocks": 4, "context": 50, "axis": "key", "documents": [0, 5, 70, 80]},
    "documents, values": {
        "size": (1, 80, 1, 16, 32),
        "blocks": 4,
        "context": 50,
        "axis": "value",
        "documents": [0, 5, 70, 80],
        "initial": True,
    },
    "documents, ungated": {"size": (1, 80, 1, 16, 16), "documents": [0, 5, 70, 80], "initial": True},
    "strength zero": {"size": (1, 20, 1, 16, 16), "strength": 0.0},
    "half precision": {"size": (1, 100, 1, 32, 32), "blocks": 4, "context": 96, "axis": "key", "dtype": "float16"},
    "half precision, values": {"size": (1, 100, 1, 32, 96), "blocks": 4, "context": 96, "axis": "value", "dtype": "float16"},
    "over 128 key rows, keys": {"size": (1, 70, 1, 160, 144), "blocks": 4, "context": 64, "axis": "key", "dtype": "float16"},
    "over 128 key rows, values": {
        "size": (1, 70, 1, 144, 160),
        "blocks": 4,
        "context": 64,
        "axis": "value",
        "dtype": "float16",
        "initial": True,
    },
}
# What only the window of sliding-window attention can get wrong: pairs across an unlock, chunk or document.
WINDOWS: dict[str, dict[str, Any]] = {
    "unlock at every token, keys": {"size": (1, 20, 2, 80, 16), "blocks": 20, "context": 20, "axis": "key", "initial": True},
    "unlock at every token, values": {"size": (1, 20, 2, 16, 80), "blocks": 20, "context": 20, "axis": "value", "initial": True},
    "carried past two value tiles": {
        "size": (1, 100, 1, 16, 130),
        "blocks": 5,
        "context": 90,
        "axis": "value",
        "initial": True,
        "decay": 50.0,
    },
    "carried past both key tiles": {"size": (1, 100, 1, 48, 16), "blocks": 3, "context": 90, "axis": "key", "initial": True},
    "documents of one token": {
        "size": (1, 70, 1, 16, 16),
        "blocks": 4,
        "context": 60,
        "axis": "key",
        "documents": [0, 3, 4, 69, 70],
        "initial": True,
    },
}
CASES = {f"{rule}: {name}": {"rule": rule, **case} for rule in NAMES for name, case in SHAPES.items()}
CASES |= {f"swla: {name}": {"rule": "swla", **case} for name, case in WINDOWS.items()}
STEPS = {f"{rule} step, {axis}": {"rule": rule, "axis": axis} for rule in NAMES for axis in ("key", "value", "all")}


def inputs(rule: str, size: tuple[int, ...], decay: float = 1.0, strength: float = 1.0) -> dict[str, Tensor]:
    """Fresh random tensors of a rule in fp32: unit q, k, p."""
    rows, length, heads, keys, values = size
    unit = [normalize(torch.randn(rows, length, heads, keys), dim=-1) for _ in range(3)]
    every = {
        **dict(zip("qkp", unit)),
        "v": torch.randn(rows, length, heads, values),
        "g": -decay * torch.rand(rows, length, heads),
        "beta": strength * torch.rand(rows, length, heads),
        "gamma": strength * torch.rand(rows, length, heads, 2),
    }
    return {name: every[name] for name in NAMES[rule].split()}


def error(ours: Tensor, right: Tensor) -> float:
    """Root mean square of the difference, relative to that of the right tensor (absolute where that is zero)."""
    return ((ours.double() - right).norm() / (right.norm() if right.norm() > 0 else 1.0)).item()


def measure(case: dict[str, Any]) -> dict[str, float]:
    """Errors of out, final state and every gradient, and of out where nothing is kept for gradients.

    `locked`, of a gated call: how many numbers are not zero in gradients of q, k, p and v where the oracle's are.
    """
    from proteus_lm.ops import reference, triton

    rule, size, axis = case["rule"], case["size"], case.get("axis", "key")
    dtype = getattr(torch, case.get("dtype", "float32"))
    tensors = inputs(rule, size, case.get("decay", 1.0), case.get("strength", 1.0))
    tensors = {n: x.to(dtype) if n in "qkvp" else x for n, x in tensors.items()}
    bounds = torch.tensor(case["documents"]) if "documents" in case else None
    keywords = {"axis": axis, "cu_seqlens": bounds, "output_final_state": True}
    if "blocks" in case:
        offset = torch.tensor(case["offset"]) if "offset" in case else None
        schedule = ActivationSchedule(case["blocks"], case["context"])
        dim = size[3] if axis == "key" else size[4]
        keywords["activation"] = schedule.activation(dim, size[1], offset=offset, cu_seqlens=bounds)
    count = size[0] if bounds is None else len(bounds) - 1
    states: list[Tensor] = []
    if case.get("initial"):
        states = [torch.randn(count, *size[2:])]
        if rule == "swla":
            states += [torch.randn(count, 1, size[2], size[3]), torch.randn(count, 1, size[2], size[4])]
    results = []
    gradient = None
    for module, kind in ((triton, None), (reference, torch.float64)):
        given = {n: x.detach().to(kind or x.dtype).requires_grad_() for n, x in tensors.items()}
        held = [x.to(kind or x.dtype).requires_grad_() for x in states]
        start = (SWLAState(*held) if rule == "swla" else held[0]) if held else None
        out, final = getattr(module, rule)(**given, initial_state=start, **keywords)
        window = final[1:] if isinstance(final, SWLAState) else ()
        final = final.matrix if isinstance(final, SWLAState) else final
        if gradient is None:
            gradient = torch.randn(out.shape).to(out.dtype), torch.randn(final.shape)
            with torch.no_grad():
                alone, _ = getattr(module, rule)(**given, initial_state=start, **keywords)
        sums = [x.to(kind or torch.float32) * y.to(kind or torch.float32) for x, y in zip((out, final), gradient)]
        grads = torch.autograd.grad(sum(x.sum() for x in sums), [*given.values(), *held])
        results.append([out, final, *window, *grads])
    names = ["out", "final", *(f"window{i}" for i in range(len(window)))]
    names += [*(f"d{n}" for n in tensors), *(f"dstate{i}" for i in range(len(states)))]
    errors = {n: error(a, b.double()) for n, a, b in zip(names, *results)} | {"out alone": error(alone, results[1][0])}
    pairs = [(a, b) for n, a, b in zip(names, *results) if n in ("dq", "dk", "dp", "dv") and "blocks" in case]
    return errors | {"locked": float(sum(a[b == 0].count_nonzero() for a, b in pairs))}


def measure_step(case: dict[str, Any]) -> dict[str, float]:
    """Errors of a decoding step of three rows at their own positions; `locked` counts bits that moved where they must not."""
    from proteus_lm.ops import recurrent, triton

    rule, axis = case["rule"], "key" if case["axis"] == "all" else case["axis"]
    keys, values = 24, 40
    tensors = {n: x[:, 0] for n, x in inputs(rule, (3, 1, 2, keys, values)).items()}
    state = torch.randn(3, 2, keys, values)
    active = None if case["axis"] == "all" else torch.tensor([1, 9, keys if axis == "key" else values])
    wide, held = {n: x.double() for n, x in tensors.items()}, state.double()
    if rule == "swla":  # the kernel takes the window with the new pair in it
        past = torch.randn(3, 1, 2, keys), torch.randn(3, 1, 2, values)
        held = SWLAState(held, *(x.double() for x in past))
        window = {n: torch.cat((x, tensors.pop(y)[:, None]), 1) for n, x, y in zip(("keys", "values"), past, ("k", "v"))}
        tensors = {"q": tensors["q"], "v": window["values"][:, -1], "g": tensors["g"], "gamma": tensors["gamma"], **window}
    right, after = getattr(recurrent, f"{rule}_step")(**wide, state=held, active=active, axis=axis)
    after = getattr(after, "matrix", after)
    out, moved = getattr(triton, f"{rule}_step")(**tensors, state=state, active=active, axis=axis)
    given = state.clone()
    _, same = getattr(triton, f"{rule}_step")(**tensors, state=given, active=active, axis=axis, inplace=True)
    locked = torch.zeros_like(state, dtype=torch.bool)
    if active is not None:
        shut = torch.arange(keys if axis == "key" else values) >= active[:, None]
        locked = locked | (shut[:, None, :, None] if axis == "key" else shut[:, None, None, :])
    changed = (moved != state)[locked].sum() + (same is not given) + (same != moved).sum()
    return {"out": error(out, right), "state": error(moved, after), "locked": float(changed)}


if __name__ == "__main__":
    torch.manual_seed(0)
    for name, case in CASES.items():
        print(json.dumps({"name": name, "errors": measure(case)}), flush=True)
    for name, case in STEPS.items():
        print(json.dumps({"name": name, "errors": measure_step(case)}), flush=True)
