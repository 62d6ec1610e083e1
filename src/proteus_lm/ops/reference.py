"""Every update rule one token at a time, as the paper prints it: the oracle for all other implementations.

Proteus (eq 7-11) in one line each, with M the memory, g_t the mask of token t's open coordinates:
    M~ = g_t * M_{t-1};   M_t = (1 - g_t) * M_{t-1} + g_t * Upd(M~, x_t);   o_t = Read(g_t * M_t, q_t)
with `read` "post"; with "pre" it is eq 11 to the letter, o_t = Read(g_t * M_{t-1}, q_t), without the token's own write. The rules
below give `Upd`; `_scan` does the rest. Vectorised over batch and heads, slow, in fp32 or the inputs' wider type.
Masks select (torch.where), never multiply: whatever stands in a locked coordinate, NaN included, reaches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proteus_lm.activation import Activation
from proteus_lm.ops._deep_loss import EPS
from proteus_lm.ops.memory_activations import memory_function
from proteus_lm.ops.rows import check_packed
from proteus_lm.ops.state import SWLAState, TitansState

Memory = tuple[Tensor, ...]


def _wide(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def _outer(k: Tensor, v: Tensor) -> Tensor:
    return k[..., :, None] * v[..., None, :]


def _read(memory: Tensor, q: Tensor) -> Tensor:
    return (q[..., None, :] @ memory)[..., 0, :]  # M^T q: (B, H, V)


def _documents(cu_seqlens: Tensor | None, length: int) -> list[slice]:
    bounds = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    return [slice(a, b) for a, b in zip(bounds, bounds[1:])]


def _scan(
    update: Callable[[Tensor, int], Tensor],
    q: Tensor,
    values: int,
    activation: Activation | None,
    axis: str,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    read: str,
) -> tuple[Tensor, Tensor]:
    """Run `update(open part of M, t) -> M` over the tokens of each document, and read M after it ("post") or before ("pre")."""
    check_packed(len(q), cu_seqlens)
    rows, length, heads, keys = q.shape
    factor = keys**-0.5 if scale is None else scale
    mask = None if activation is None else activation.mask()
    outputs, finals = [], []
    for index, document in enumerate(_documents(cu_seqlens, length)):
        if initial_state is None:
            memory = q.new_zeros(rows, heads, keys, values)
        else:
            memory = (initial_state if cu_seqlens is None else initial_state[index : index + 1]).to(q.dtype)
        zero = memory.new_zeros(())
        for t in range(document.start, document.stop):
            before = memory
            if mask is None:
                memory = update(memory, t)
                seen = memory if read == "post" else before
            else:
                gate = mask[:, t, None, :, None] if axis == "key" else mask[:, t, None, None, :]
                memory = torch.where(gate, update(torch.where(gate, memory, zero), t), memory)
                seen = torch.where(gate, memory if read == "post" else before, zero)
            outputs.append(factor * _read(seen, q[:, t]))
        finals.append(memory)
    return torch.stack(outputs, 1), torch.cat(finals)


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    activation: Activation | None = None,
    axis: str = "key",
    scale: float | None = None,
    read: str = "post",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """S_t = e^g S_{t-1} + k v^T (spec/linear.md 1.1). Shapes and arguments as `proteus_lm.ops.retention`."""
    dtype = _wide(q, k, v, g)
    q, k, v_, g = (x.to(dtype) for x in (q, k, v, g))
    decay = g.exp()[..., None, None]
    out, state = _scan(
        lambda S, t: decay[:, t] * S + _outer(k[:, t], v_[:, t]),
        *(q, v.shape[-1], activation, axis, scale, initial_state, cu_seqlens, read),
    )
    return out.to(v.dtype), state if output_final_state else None


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    activation: Activation | None = None,
    axis: str = "key",
    scale: float | None = None,
    read: str = "post",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """S_t = S_{t-1} + beta k (v - S_{t-1}^T k)^T (spec/linear.md 1.2). As `proteus_lm.ops.delta_rule`."""
    dtype = _wide(q, k, v, beta)
    q, k, v_, beta = (x.to(dtype) for x in (q, k, v, beta))
    out, state = _scan(
        lambda S, t: S + _outer(k[:, t], beta[:, t, :, None] * (v_[:, t] - _read(S, k[:, t]))),
        *(q, v.shape[-1], activation, axis, scale, initial_state, cu_seqlens, read),
    )
    return out.to(v.dtype), state if output_final_state else None


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    activation: Activation | None = None,
    axis: str = "key",
    scale: float | None = None,
    read: str = "post",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """S_t = e^g S_{t-1} + beta k (v - e^g S_{t-1}^T k)^T: the error is against the decayed state (spec/linear.md 1.5)."""
    dtype = _wide(q, k, v, g, beta)
    q, k, v_, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    decay = g.exp()[..., None, None]

    def update(S: Tensor, t: int) -> Tensor:
        S = decay[:, t] * S
        return S + _outer(k[:, t], beta[:, t, :, None] * (v_[:, t] - _read(S, k[:, t])))

    out, state = _scan(update, q, v.shape[-1], activation, axis, scale, initial_state, cu_seqlens, read)
    return out.to(v.dtype), state if output_final_state else None


def comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    activation: Activation | None = None,
    axis: str = "key",
    scale: float | None = None,
    read: str = "post",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """S_t = e^g S_{t-1} + beta k (v - S_{t-1}^T p)^T: the error is against the undecayed state (spec/linear.md 1.3)."""
    dtype = _wide(q, k, v, p, g, beta)
    q, k, v_, p, g, beta = (x.to(dtype) for x in (q, k, v, p, g, beta))
    decay = g.exp()[..., None, None]
    out, state = _scan(
        lambda S, t: decay[:, t] * S + _outer(k[:, t], beta[:, t, :, None] * (v_[:, t] - _read(S, p[:, t]))),
        *(q, v.shape[-1], activation, axis, scale, initial_state, cu_seqlens, read),
    )
    return out.to(v.dtype), state if output_final_state else None


def swla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    gamma: Tensor,
    *,
    activation: Activation | None = None,
    axis: str = "key",
    scale: float | None = None,
    read: str = "post",
    initial_state: Tensor | SWLAState | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, SWLAState | None]:
    """S_t = e^g S_{t-1} + sum_{j<c} gamma[..., j] k_{t-j} v_{t-j}^T, masked by the write time t (spec/linear.md 1.4, 2.8)."""
    dtype = _wide(q, k, v, g, gamma)
    q, k, v_, g, gamma = (x.to(dtype) for x in (q, k, v, g, gamma))
    rows, length, heads, keys = q.shape
    past = gamma.shape[-1] - 1
    documents = _documents(cu_seqlens, length)
    if isinstance(initial_state, SWLAState):
        matrix, window_k, window_v = (x.to(dtype) for x in initial_state)
    else:
        matrix = initial_state
        count = rows if cu_seqlens is None else len(documents)
        window_k, window_v = q.new_zeros(count, past, heads, keys), q.new_zeros(count, past, heads, v.shape[-1])
    # A document's tokens behind its window: token t stands at index past + t - start.
    parts = [
        (torch.cat((wk, k[:, d]), 1), torch.cat((wv, v_[:, d]), 1))
        for d, wk, wv in zip(
            documents,
            (window_k,) if cu_seqlens is None else window_k.split(1),
            (window_v,) if cu_seqlens is None else window_v.split(1),
        )
    ]
    where = {t: (i, t - d.start + past) for i, d in enumerate(documents) for t in range(d.start, d.stop)}
    decay = g.exp()[..., None, None]

    def update(S: Tensor, t: int) -> Tensor:
        document, at = where[t]
        seen_k, seen_v = parts[document]
        S = decay[:, t] * S
        for j in range(past + 1):
            S = S + _outer(gamma[:, t, :, j, None] * seen_k[:, at - j], seen_v[:, at - j])
        return S

    out, final = _scan(update, q, v.shape[-1], activation, axis, scale, matrix, cu_seqlens, read)
    if not output_final_state:
        return out.to(v.dtype), None
    tails = [torch.cat([part[i][:, part[i].shape[1] - past :] for part in parts]) for i in (0, 1)]
    return out.to(v.dtype), SWLAState(final, *tails)


# Titans: a small MLP f(x) = act(... act(x W1) ...) WL is the memory, and a token is written by one step of gradient descent.
# A gated one has two matrices in each hidden layer: f(x) = (silu(x W1) * (x U1)) W2; deeper, every hidden layer is such a pair.


def _layers(weights: Sequence[Tensor], function: str) -> list[Sequence[Tensor]]:
    """The matrices layer by layer: those of each hidden layer, one or a gate's and a value's; the last alone."""
    arity = memory_function(function).arity
    return [weights[i : i + arity] for i in range(0, len(weights), arity)]


def _layer_masks(active: Tensor, weights: Sequence[Tensor], function: str) -> list[Tensor]:
    """Open entries of each matrix, broadcastable to (B, H, in, out), for `active` (B,) open units.

    Units are hidden ones; an inner matrix is open where both its units are. A single matrix opens by key rows.
    """
    layers = _layers(weights, function)
    masks = []
    for number, layer in enumerate(layers):
        for w in layer:
            rows, columns = ((torch.arange(n, device=active.device) < active[:, None])[:, None] for n in w.shape[-2:])
            row = rows[..., :, None] if number > 0 or len(layers) == 1 else None
            column = columns[..., None, :] if number < len(layers) - 1 else None
            masks.append(row if column is None else column if row is None else row & column)
    return masks


def _apply(weights: Sequence[Tensor], x: Tensor, function: str) -> tuple[Tensor, list[Tensor], list[list[Tensor]]]:
    """f(x) for x (B, H, D): the output, each layer's input, and what each hidden layer's matrices put out."""
    *hidden, (last,) = _layers(weights, function)
    inputs, before = [], []
    for layer in hidden:
        inputs.append(x)
        before.append([_read(w, x) for w in layer])
        x = memory_function(function).join(before[-1])
    return _read(last, x), [*inputs, x], before


def _layer_norm(z: Tensor) -> tuple[Tensor, Tensor]:
    """z without mean and of deviation one over the last dimension, and the deviation it had."""
    deviation = (z.var(-1, correction=0, keepdim=True) + EPS).sqrt()
    return (z - z.mean(-1, keepdim=True)) / deviation, deviation


def inner_gradient(
    weights: Sequence[Tensor], k: Tensor, v: Tensor, function: str, norm: tuple[Tensor, Tensor] | None = None
) -> list[Tensor]:
    """Gradient of 1/2 ||f(k) - v||^2 with respect to each matrix, by the chain rule (so that it works without autograd).

    Args:
        weights: (B, H, in, out) each.  k: (B, H, D).  v: (B, H, Dv).
        norm: gain and bias (H, Dv) of a layer norm behind f (spec/deep.md 2.2); of f(x) = x + LN(..), v is v - k.
    """
    out, inputs, before = _apply(weights, k, function)
    error = out - v
    if norm is not None:
        unit, deviation = _layer_norm(out)
        error = (unit * norm[0] + norm[1] - v) * norm[0]
        error = (error - error.mean(-1, keepdim=True) - unit * (unit * error).mean(-1, keepdim=True)) / deviation
    gradients, errors = [], [error]  # with respect to each matrix; to what each matrix of a layer puts out
    for i, layer in reversed(list(enumerate(_layers(weights, function)))):
        gradients = [*(_outer(inputs[i], error) for error in errors), *gradients]
        if i:
            below = sum(_read(w.mT, error) for w, error in zip(layer, errors))
            errors = [below * slope for slope in memory_function(function).slopes(before[i - 1])]
    return gradients


def titans_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    alpha: Tensor,
    eta: Tensor,
    weights: Sequence[Tensor],
    *,
    chunk: int,
    read: str = "post",
    memory_activation: str = "gelu_tanh",
    surprise_clip: float | None = None,
    decay_target: str = "zero",
    residual_norm: tuple[Tensor, Tensor] | None = None,
    activation: Activation | None = None,
    initial_state: TitansState | tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, TitansState | None]:
    """Titans eq 11-15 under Proteus' mask (spec/deep.md 1.1, 3.1). As `proteus_lm.ops.titans_memory`.

    S_t = eta_t S_{t-1} - theta_t grad l(M_F; k_t, v_t);  M_t = (1 - alpha_t) M_{t-1} + S_t;  y_t = M_t(q_t) ("post") or
    M_{t-1}(q_t) ("pre"); M_F are the weights at the last boundary of `chunk`. All of it in the open entries only. With
    `surprise_clip` tau, grad l is scaled by min(1, tau / ||grad l||); with `decay_target` "init", M_t has alpha_t M_0 more; with
    `residual_norm`, M(x) is x + LN(M(x)), and v - k is what LN(M(k)) is to be.
    """
    check_packed(len(q), cu_seqlens)
    dtype = _wide(q, k, v, theta, alpha, eta, *weights)
    tensors = [x.to(dtype) for x in (q, k, v, theta, alpha, eta)]
    weights = [w.to(dtype) for w in weights]
    if residual_norm is not None:
        tensors[2] = tensors[2] - tensors[1]
    units = weights[-1].shape[-2]
    batch, length = q.shape[:2]
    if activation is None:
        active = torch.full((1, length), units, device=q.device)
        start = initial_state.position if isinstance(initial_state, TitansState) else 0
    else:
        active, start = activation.active, activation.offset
    outputs, finals = [], []
    rule = _Rule(memory_activation, surprise_clip, weights if decay_target == "init" else None, residual_norm)
    for index, d in enumerate(_documents(cu_seqlens, length)):
        state, at = initial_state, start
        if cu_seqlens is not None:
            at = start[index : index + 1] if isinstance(start, Tensor) else start
            state = _pick(initial_state, index)
        out, final = _titans_document(
            *([x[:, d] for x in tensors], weights, active[:, d].expand(batch, -1)),
            *(chunk, read, rule, state, at),
        )
        outputs.append(out)
        finals.append(final)
    joined = TitansState(*(_join(part) for part in zip(*finals)))
    return torch.cat(outputs, 1).to(v.dtype), joined if output_final_state else None


def _join(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    return tuple(torch.cat(x) for x in zip(*parts))


def _pick(state: Any, index: int) -> Any:
    """One document's part of a state."""
    if state is None:
        return None
    row: list[Any] = [
        tuple(x[index : index + 1] for x in p) if isinstance(p, (tuple, list)) else p[index : index + 1] for p in state
    ]
    return TitansState(*row) if isinstance(state, TitansState) else tuple(row)


class _Rule(NamedTuple):
    """How a memory learns: the function between its layers, the limit of a token's gradient, what it decays to, (H, in, out), and
    gain and bias (H, D) of the norm of a residual one."""

    function: str
    clip: float | None
    target: Sequence[Tensor] | None
    norm: tuple[Tensor, Tensor] | None


def _titans_document(
    tensors: list[Tensor],
    weights: list[Tensor],
    active: Tensor,
    chunk: int,
    read: str,
    rule: _Rule,
    state: TitansState | tuple | None,
    start: int | Tensor,
) -> tuple[Tensor, TitansState]:
    q, k, v, theta, alpha, eta = tensors
    batch, length = q.shape[:2]
    position = torch.as_tensor(start, device=q.device).expand(batch).long()
    if state is None:
        boundary: Memory = tuple(w.expand(batch, *w.shape[-3:]) for w in weights)
        momentum0: Memory = tuple(torch.zeros_like(w) for w in boundary)
        state = (boundary, momentum0)
    if not isinstance(state, TitansState):  # bare weights: an empty open chunk
        empty: list[Any] = [x.new_zeros(batch, chunk, *x.shape[2:]) for x in (k, v, theta, alpha, eta)]
        bare: list[Any] = [tuple(x.to(q.dtype) for x in part) for part in state]
        state = TitansState._make([*bare, *empty, active.new_zeros(batch, chunk), position])
    boundary, boundary_momentum = state.weights, state.momentum
    current, momentum = _replay(state, rule)
    outputs = []
    for t in range(length):
        token = (k[:, t], v[:, t], theta[:, t], alpha[:, t], eta[:, t], active[:, t])
        masks = _layer_masks(active[:, t], weights, rule.function)
        before = current
        current, momentum = _write(current, momentum, boundary, token, rule)
        seen = current if read == "post" else before
        read_out = _apply([torch.where(m, w, 0.0) for m, w in zip(masks, seen)], q[:, t], rule.function)[0]
        if rule.norm is not None:
            read_out = q[:, t] + _layer_norm(read_out)[0] * rule.norm[0] + rule.norm[1]
        outputs.append(read_out)
        full = ((position + t + 1) % chunk == 0)[:, None, None, None]  # the next token's gradient is taken at the new weights
        boundary = tuple(torch.where(full, w, b) for w, b in zip(current, boundary))
        boundary_momentum = tuple(torch.where(full, s, b) for s, b in zip(momentum, boundary_momentum))
    rows = _open_rows(state, (k, v, theta, alpha, eta, active), position, length)
    return torch.stack(outputs, 1), TitansState._make([boundary, boundary_momentum, *rows, position + length])


def _open_rows(state: TitansState, tokens: tuple[Tensor, ...], start: Tensor, length: int) -> Any:
    """The tokens since the last boundary, by slot: of this call, or still of the state before it; zero where there is none."""
    chunk = state.k.shape[1]
    end = start + length
    places = (end // chunk * chunk)[:, None] + torch.arange(chunk, device=start.device)
    taken = (places - start[:, None]).clamp(0, length - 1)
    rows = []
    for old, new in zip(state[2:8], tokens):
        shape = (*places.shape, *[1] * (new.dim() - 2))
        value = new.gather(1, taken.view(shape).expand(*places.shape, *new.shape[2:]))
        value = torch.where((places < start[:, None]).view(shape), old, value)
        rows.append(torch.where((places < end[:, None]).view(shape), value, value.new_zeros(())))
    return rows


def _write(current: Memory, momentum: Memory, boundary: Memory, token: tuple[Tensor, ...], rule: _Rule) -> tuple[Memory, Memory]:
    """One token's step of gradient descent with momentum and forgetting, in the open entries; `active` 0 writes nothing."""
    k, v, theta, alpha, eta, active = token
    masks = _layer_masks(active, current, rule.function)
    opened = [torch.where(m, w, 0.0) for m, w in zip(masks, boundary)]
    gradients = inner_gradient(opened, k, v, rule.function, rule.norm)
    if rule.clip is not None:  # a constant to the outer gradient
        entries = [torch.where(m, u.detach(), 0.0).flatten(2) for m, u in zip(masks, gradients)]
        norm = torch.cat(entries, 2).norm(dim=2)[..., None, None]
        gradients = [u * (rule.clip / norm.clamp(min=rule.clip)) for u in gradients]
    theta, alpha, eta = (x[..., None, None] for x in (theta, alpha, eta))
    here = (active > 0)[:, None, None, None]
    masks = [m & here for m in masks]
    momentum = tuple(torch.where(m, eta * s - theta * u, s) for m, s, u in zip(masks, momentum, gradients))
    kept = [(1 - alpha) * w for w in current]
    if rule.target is not None:
        kept = [w + alpha * w0 for w, w0 in zip(kept, rule.target)]
    return tuple(torch.where(m, w + s, old) for m, w, s, old in zip(masks, kept, momentum, current)), momentum


def titans_weights(
    state: TitansState,
    *,
    memory_activation: str = "gelu_tanh",
    surprise_clip: float | None = None,
    initial: Sequence[Tensor] | None = None,
    residual_norm: tuple[Tensor, Tensor] | None = None,
) -> tuple[Memory, Memory]:
    """Weights and momentum after the last token seen: those of the boundary, and the open chunk's tokens written again.

    Returns:
        (W1 .. WL), (S1 .. SL), each (N, H, in, out).
    """
    return _replay(state, _Rule(memory_activation, surprise_clip, initial, residual_norm))


def _replay(state: TitansState, rule: _Rule) -> tuple[Memory, Memory]:
    current, momentum = state.weights, state.momentum
    for i in range(state.k.shape[1]):
        token = tuple(x[:, i] for x in state[2:8])
        current, momentum = _write(current, momentum, state.weights, token, rule)
    return current, momentum
