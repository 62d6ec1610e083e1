"""One decoding step of Titans' MLP memory, for rows that stand at different positions.

Pure tensor operations at full shape: slots and open units are chosen by numbers on the device, so nothing waits for the host and a
compiled step never changes with the position. The mathematics is that of the chunk form, with one reading row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proteus_lm.ops import _deep_chunk, triton_deep
from proteus_lm.ops._deep_activation import POINTWISE
from proteus_lm.ops._deep_chunk import Scales, entries, opening
from proteus_lm.ops._linear_operator import compute_dtype
from proteus_lm.ops.backend import choose
from proteus_lm.ops.deep import READS, Norm, answer, check_depth, check_norm, check_update, chunk_form, refused_update, residual
from proteus_lm.ops.memory_activations import places
from proteus_lm.ops.state import TitansState


def titans_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    alpha: Tensor,
    eta: Tensor,
    state: TitansState,
    *,
    active: Tensor | None = None,
    read: str = "post",
    memory_activation: str = "gelu_tanh",
    surprise_clip: float | None = None,
    initial: Sequence[Tensor] | None = None,
    residual_norm: Norm | None = None,
    backend: str = "auto",
    inplace: bool = False,
) -> tuple[Tensor, TitansState]:
    """Write one token a row into the memory and read it: `titans_memory` for T = 1 (spec/deep.md 3.5).

    Computed in fp32, or fp64 if an input is, whatever the autocast; by the GPU kernel as it says. Where a gradient is wanted, the
    chunk form runs.

    Args:
        q, k: (N, H, D).  v: (N, H, Dv).  theta, alpha, eta: (N, H), values in [0, 1].
        state: what `titans_memory` or an earlier step returned; its chunk is the model's.
        active: int (N,), open hidden units (key rows for one layer) of each row at its token; None: all.
        read, memory_activation, surprise_clip, residual_norm: as in `titans_memory`.
        initial: W1 (H, in, out) .. WL, the `weights` of `titans_memory` where its decay_target is "init"; None: decay to zero.
        backend: "auto", "chunk" (PyTorch) or "triton" (bf16 products for bf16 tokens, else fp32 by three of tf32).
        inplace: move the given state on itself: the kernel alone can, and then touches open units alone.

    Returns:
        y (N, H, Dv) in v's type; the new state, which is the given one with `inplace`.

    Raises:
        ValueError: for shapes or options that do not fit each other, or a backend that cannot run them.
    """
    tokens = (k, v, theta, alpha, eta)
    _check(q, tokens, state, read)
    check_depth(state.weights, memory_activation)
    check_update(surprise_clip, "zero")
    check_norm(residual_norm, k, v)
    target, norm = _target(initial, state), residual_norm or ()
    refusal = refused_update(surprise_clip, "init" if target else "zero", residual_norm, memory_activation)
    refusal = refusal or triton_deep.refuse_step((q, *tokens), state.weights, state.momentum, state.k.shape[1])
    if backend == "auto":
        refusal = refusal or triton_deep.unchecked_step((q, *tokens), state.weights, state.k.shape[1])
    refused = {"triton": refusal, "native": "the C kernel has no single step"}
    if choose("titans_memory", backend, q, k, v, refused=refused) == "triton":
        return triton_deep.step((q, *tokens), state, active, read, memory_activation, inplace)
    if inplace:
        raise ValueError("inplace is for the Triton kernel, which does not run here; use inplace=False")
    dtype, given = compute_dtype(q, *tokens, *state.weights), v.dtype
    if norm:
        v = residual(k, v, dtype)
        tokens = (k, v, theta, alpha, eta)
    needed = (q, *tokens, *state.weights, *state.momentum, *target, *norm, *state[2:7])
    if torch.is_grad_enabled() and any(t.requires_grad for t in needed):
        y, after = _with_gradients(q, tokens, state, active, read, memory_activation, surprise_clip, target, norm)
        return answer(y, q, given, residual_norm), after
    units, chunk = state.weights[-1].shape[-2], state.k.shape[1]
    slot = state.position.remainder(chunk)
    here = torch.arange(chunk, device=slot.device) == slot[:, None]
    now = torch.full_like(slot, units) if active is None else active.to(slot)
    with torch.autocast(q.device.type, enabled=False):
        rows = [_put(old.to(dtype), new.to(dtype), here) for old, new in zip(state[2:7], tokens)]
        open_units = torch.where(here, now[:, None], state.active)
        weights, momentum = ([t.to(dtype).flatten(0, 1) for t in part] for part in (state.weights, state.momentum))
        aim = [t.to(dtype).repeat(len(q), 1, 1) for t in target]
        scale = [t.to(dtype).repeat(len(q), 1)[:, None] for t in norm]
        y, weights, momentum = _step(
            q.to(dtype), rows, open_units, now, here, slot == chunk - 1, weights, momentum, aim, scale, read,
            memory_activation, surprise_clip,
        )  # fmt: skip
    full = (slot == chunk - 1)[:, None]
    kept = [torch.where(full.view(-1, *[1] * (t.dim() - 1)), torch.zeros_like(t), t) for t in (*rows, open_units)]
    heads = q.shape[1]
    boundary = (tuple(t.unflatten(0, (-1, heads)) for t in part) for part in (weights, momentum))
    return answer(y.to(v.dtype), q, given, residual_norm), TitansState._make([*boundary, *kept, state.position + 1])


def _with_gradients(
    q: Tensor,
    tokens: tuple[Tensor, ...],
    state: TitansState,
    active: Tensor | None,
    read: str,
    memory_activation: str,
    clip: float | None,
    target: Sequence[Tensor],
    norm: Sequence[Tensor],
) -> tuple[Tensor, TitansState]:
    """The same by the chunk form, which has a backward."""
    dtype = compute_dtype(q, *tokens, *state.weights)
    wide = state._replace(weights=tuple(t.to(dtype) for t in state.weights), momentum=tuple(t.to(dtype) for t in state.momentum))
    units = torch.full_like(state.position, state.weights[-1].shape[-2]) if active is None else active
    y, final = chunk_form(
        *([t[:, None] for t in (q, *tokens)], wide, state.position, units.long()[:, None], None, True),
        carried=True,
        read=read,
        memory_activation=memory_activation,
        clip=clip,
        target=target,
        norm=norm,
    )
    assert final is not None
    return y[:, 0], final


def _step(
    q: Tensor,
    rows: list[Tensor],
    open_units: Tensor,
    now: Tensor,
    here: Tensor,
    full: Tensor,
    weights: list[Tensor],
    momentum: list[Tensor],
    target: list[Tensor],
    norm: list[Tensor],
    read: str,
    memory_activation: str,
    clip: float | None,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Read, and commit the rows whose chunk is full. weights, momentum (N * H, in, out), target too or nothing, norm (N * H, 1, D)
    or nothing; `rows` include this token."""
    act, heads, chunk = POINTWISE[memory_activation], q.shape[1], rows[0].shape[1]
    k, v = (t.transpose(1, 2).flatten(0, 1) for t in rows[:2])
    theta, alpha, eta = (t.transpose(1, 2).flatten(0, 1) for t in rows[2:])
    valid = (open_units > 0).repeat_interleave(heads, 0)
    units = weights[-1].shape[-2]
    opens, mask = (t.repeat_interleave(heads, 0) for t in opening(open_units, units))
    depth = len(weights)
    inside = 2 * [entries(opens < chunk, place) for place in places(depth, act.arity)]
    blanked = [torch.where(chosen, t, 0) for t, chosen in zip((*weights, *momentum), inside)]
    aim = [torch.where(chosen, t, 0) for t, chosen in zip(target, inside)]
    written = _deep_chunk.write(k, v, blanked[:depth], act, mask, clip, norm)
    at_end = _scales(theta, alpha, eta, valid, opens)
    seen = at_end if read == "post" else _scales(theta, alpha, eta, valid & ~here.repeat_interleave(heads, 0), opens)
    looking = opening(now[:, None], units)[1].repeat_interleave(heads, 0)
    looked = seen._replace(mask=looking)
    query = q.flatten(0, 1)[:, None]
    y, _ = _deep_chunk.read(query, blanked[:depth], blanked[depth:], written, looked, act, keep=False, target=aim)
    y = y.unflatten(0, (-1, heads))[:, :, 0]
    if not (torch.compiler.is_compiling() or full.is_cuda or full.any()):  # on a host, a look at `full` costs no wait
        return y, weights, momentum
    _deep_chunk.advance(blanked[:depth], blanked[depth:], written, at_end, aim)
    commit = full.repeat_interleave(heads, 0)[:, None, None]
    new = [torch.where(commit & chosen, a, b) for chosen, a, b in zip(inside, blanked, (*weights, *momentum))]
    return y, new[:depth], new[depth:]


def _scales(theta: Tensor, alpha: Tensor, eta: Tensor, valid: Tensor, opens: Tensor) -> Scales:
    """The scales after the last slot only, as one reading row; same formulas as `Gates`, without a recurrence. All (U, b).

    ahead[i, j] is what is left in the momentum at slot j of what went in at slot i; left[j] what is left at the end of the weights
    at slot j.
    """
    theta = torch.where(valid, theta, 0)
    keep, eta = torch.where(valid, 1 - alpha, 1), torch.where(valid, eta, 1)
    chunk = theta.shape[-1]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=theta.device).triu(1)
    ahead = torch.where(later, eta[:, None], 1).cumprod(-1).triu()
    after = torch.where(later, keep[:, None], 1).prod(-1)  # of the weights at each slot's end
    mix = (ahead @ torch.where(valid, after, 0)[..., None])[..., 0]
    decay = torch.nn.functional.pad(keep * after, (0, 1), value=1).gather(-1, opens)
    carry = torch.nn.functional.pad(eta * mix, (0, 1)).gather(-1, opens)
    momentum = ahead[..., -1]
    held = torch.nn.functional.pad(eta * momentum, (0, 1), value=1).gather(-1, opens)
    return Scales(
        decay[:, None], carry[:, None], (mix * theta)[:, None], decay, carry, held, (mix * theta)[..., None],
        (momentum * theta)[..., None],
    )  # fmt: skip


def _target(initial: Sequence[Tensor] | None, state: TitansState) -> Sequence[Tensor]:
    """What the weights decay to, or nothing.

    Raises:
        ValueError: for tensors that are not of the memory's shapes.
    """
    if initial is None:
        return ()
    shapes, wanted = [tuple(t.shape) for t in initial], [tuple(w.shape[1:]) for w in state.weights]
    if shapes != wanted:
        raise ValueError(f"initial has shapes {shapes}; it must be the memory's (H, in, out) = {wanted}")
    return initial


def _put(rows: Tensor, token: Tensor, here: Tensor) -> Tensor:
    """Rows (N, chunk, ...) with the token (N, ...) in its slot, `here` (N, chunk)."""
    return torch.where(here.view(*here.shape, *[1] * (token.dim() - 1)), token[:, None], rows)


def _check(q: Tensor, tokens: tuple[Tensor, ...], state: TitansState, read: str) -> None:
    if read not in READS:
        raise ValueError(f"read is {read!r}; it must be one of {', '.join(READS)}")
    if not isinstance(state, TitansState):
        raise ValueError(f"the state is {type(state).__name__}; it must be the TitansState of a titans_memory call")
    if q.shape != tokens[0].shape:
        raise ValueError(f"q has shape {tuple(q.shape)} and k {tuple(tokens[0].shape)}; they must be the same (N, H, D)")
    for name, token, rows in zip(("k", "v", "theta", "alpha", "eta"), tokens, state[2:7]):
        if token.shape != (rows.shape[0], *rows.shape[2:]):
            wanted = (rows.shape[0], *rows.shape[2:])
            raise ValueError(f"{name} has shape {tuple(token.shape)}; the state's rows want {wanted}")
