"""One decoding step of each linear rule, for rows that stand at different positions.

Pure tensor operations at full shape: open coordinates are chosen by a length on the device, so nothing waits for the host and a
compiled step never changes with the position. Masks select, so a locked coordinate keeps its bits and is read by nothing.

Arguments that all steps share: q, k (N, H, K) and v (N, H, V) of one token a row; g, beta (N, H); state (N, H, K, V).
`active`: int (N,), open coordinates of each row at its token (rows of the state for `axis="key"`, columns for "value"); None: all.
`read`: "post", with the token's own write, or "pre", without.
Each returns o (N, H, V) in v's type and the new state, in fp32, or fp64 if an input is. The rules: `hebbian.py`, `delta.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from proteus_lm.ops import triton
from proteus_lm.ops._linear import AXES, READS, check_choice
from proteus_lm.ops._linear_operator import compute_dtype
from proteus_lm.ops.state import SWLAState


def _read(state: Tensor, x: Tensor) -> Tensor:
    return (x[..., None, :] @ state)[..., 0, :]


def _outer(k: Tensor, v: Tensor) -> Tensor:
    return k[..., :, None] * v[..., None, :]


def _step(
    operation: str,
    update: Callable[[Tensor, dict[str, Tensor]], Tensor],
    tensors: dict[str, Tensor],
    state: Tensor,
    active: Tensor | None,
    axis: str,
    scale: float | None,
    read: str,
) -> tuple[Tensor, Tensor]:
    """Apply `update(open part of the state, tensors) -> state` where it is open, and read it with q, after that or before.

    On a GPU, and where no gradient is wanted, the operation's kernel does it in one launch, if it has one.

    Raises:
        ValueError: for an axis that is neither "key" nor "value", or a read that is neither "post" nor "pre".
    """
    check_choice("axis", axis, AXES)
    check_choice("read", read, READS)
    if triton.refuse_step(operation, tuple(tensors.values()), state, read) is None:
        return getattr(triton, f"{operation}_step")(*tensors.values(), state, active=active, axis=axis, scale=scale)
    out_type = tensors["v"].dtype
    factor = tensors["q"].shape[-1] ** -0.5 if scale is None else scale
    dtype = compute_dtype(state, *tensors.values())
    tensors, state = {n: x.to(dtype) for n, x in tensors.items()}, state.to(dtype)
    with torch.autocast(state.device.type, enabled=False):
        if active is None:
            before, state = state, update(state, tensors)
            out = _read(state if read == "post" else before, tensors["q"])
        else:
            zero = state.new_zeros(())
            size, shape = (state.shape[-2], (-1, 1)) if axis == "key" else (state.shape[-1], (1, -1))
            opened = torch.arange(size, device=state.device) < active[:, None, None]  # (N, 1, K or V)
            for name in ("q", "k", "p") if axis == "key" else ():  # what stands there reads with weight 0, unless it is NaN
                if name in tensors:
                    tensors[name] = torch.where(opened, tensors[name], zero)
            opened = opened.unflatten(-1, shape)
            before, state = state, torch.where(opened, update(torch.where(opened, state, zero), tensors), state)
            out = _read(torch.where(opened, state if read == "post" else before, zero), tensors["q"])
    return (out * factor).to(out_type), state


def _delta(state: Tensor, x: dict[str, Tensor], reader: str) -> Tensor:
    return _outer(x["k"], x["beta"][..., None] * (x["v"] - _read(state, x[reader])))


def _decay(state: Tensor, x: dict[str, Tensor]) -> Tensor:
    return x["g"].exp()[..., None, None] * state


def retention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: Tensor,
    *,
    active: Tensor | None = None,
    axis: str = "key",
    scale: float | None = None,
    read: str = "post",
) -> tuple[Tensor, Tensor]:
    """One token of `retention`; arguments as described at the top of this file."""
    tensors = {"q": q, "k": k, "v": v, "g": g}
    return _step("retention", lambda s, x: _decay(s, x) + _outer(x["k"], x["v"]), tensors, state, active, axis, scale, read)


def swla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    gamma: Tensor,
    state: SWLAState,
    *,
    active: Tensor | None = None,
    axis: str = "key",
    scale: float | None = None,
    read: str = "post",
) -> tuple[Tensor, SWLAState]:
    """One token of `swla`; gamma (N, H, c), state and new state an `SWLAState`, the rest as at the top of this file.

    The whole window is written where it is open now: a pair that came before an unlock reaches the new block.
    """
    dtype = compute_dtype(q, k, v, g, gamma, *state)
    keys, values = (torch.cat((w.to(dtype), x[:, None].to(dtype)), 1) for w, x in zip(state[1:], (k, v)))
    tensors = {"q": q, "v": v, "g": g, "gamma": gamma, "keys": keys, "values": values}

    def update(memory: Tensor, x: dict[str, Tensor]) -> Tensor:
        weights = x["gamma"].flip(-1).transpose(1, 2)[..., None]  # (N, c, H, 1), oldest pair first
        return _decay(memory, x) + (weights * x["keys"]).permute(0, 2, 3, 1) @ x["values"].transpose(1, 2)

    out, matrix = _step("swla", update, tensors, state.matrix, active, axis, scale, read)
    return out, SWLAState(matrix, keys[:, 1:].contiguous(), values[:, 1:].contiguous())  # one layout for compiled steps


def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    active: Tensor | None = None,
    axis: str = "key",
    scale: float | None = None,
    read: str = "post",
) -> tuple[Tensor, Tensor]:
    """One token of `delta_rule`; arguments as described at the top of this file."""
    tensors = {"q": q, "k": k, "v": v, "beta": beta}
    return _step("delta_rule", lambda s, x: s + _delta(s, x, "k"), tensors, state, active, axis, scale, read)


def gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    active: Tensor | None = None,
    axis: str = "key",
    scale: float | None = None,
    read: str = "post",
) -> tuple[Tensor, Tensor]:
    """One token of `gated_delta_rule`; arguments as described at the top of this file."""

    def update(memory: Tensor, x: dict[str, Tensor]) -> Tensor:
        memory = _decay(memory, x)
        return memory + _delta(memory, x, "k")

    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return _step("gated_delta_rule", update, tensors, state, active, axis, scale, read)


def comba_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    active: Tensor | None = None,
    axis: str = "key",
    scale: float | None = None,
    read: str = "post",
) -> tuple[Tensor, Tensor]:
    """One token of `comba`; p (N, H, K), the rest as described at the top of this file."""
    tensors = {"q": q, "k": k, "v": v, "p": p, "g": g, "beta": beta}
    return _step("comba", lambda s, x: _decay(s, x) + _delta(s, x, "p"), tensors, state, active, axis, scale, read)
