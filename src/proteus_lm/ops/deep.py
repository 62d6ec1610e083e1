"""Titans' neural memory: an MLP that learns at test time by gradient descent with momentum and forgetting, in its dual form."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from proteus_lm.activation import Activation
from proteus_lm.ops import native, reference, triton_deep
from proteus_lm.ops._deep_loss import normalize
from proteus_lm.ops._deep_scan import check_position, titans_scan
from proteus_lm.ops._linear_operator import compute_dtype
from proteus_lm.ops.backend import Known, choose
from proteus_lm.ops.memory_activations import matrix_names, memory_function, places
from proteus_lm.ops.rows import check_floating, check_packed
from proteus_lm.ops.state import TitansState
from proteus_lm.schedule import ActivationSchedule

READS = ("post", "pre")
DECAY_TARGETS = ("zero", "init")
Norm = tuple[Tensor, Tensor]
InitialState = TitansState | tuple[Sequence[Tensor], Sequence[Tensor]]


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
    residual_norm: Norm | None = None,
    activation: Activation | None = None,
    initial_state: InitialState | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, TitansState | None]:
    """Write each token into an MLP memory f(x) = act(.. act(x W1) ..) WL and read it (Titans eq 11-18; spec/deep.md 1.1, 3.1):

        u_t = gradient of 1/2 ||f(k_t) - v_t||^2 at the weights of the last boundary of `chunk` in the document's own positions
        S_t = eta_t S_{t-1} - theta_t u_t,    W_t = (1 - alpha_t) W_{t-1} + S_t,    y_t = f(q_t) at W_t ("post") or W_{t-1} ("pre")

    in the open entries; locked ones are neither read, written, given momentum nor decayed, and keep their bits (Proteus eq 7-11).
    Blocks are hidden units; an inner matrix's entry is open when both its units are. With one layer they are its rows.
    Any split of a sequence into calls gives the same, as the state carries the open chunk. Computed in fp32, or fp64 if an input
    is, whatever the autocast. First derivatives reach every tensor, those of `initial_state` included. NaN in a unit stays out of
    all chunks before the one it opens in.

    Args:
        q, k: (B, T, H, D), any floating type, as every tensor here. Normalisation is the caller's.
        v: (B, T, H, Dv).
        theta, alpha, eta: (B, T, H), step, forgetting and momentum, values in [0, 1] (not logs). Unchecked. Steps with
            theta * chunk / (1 - eta) above about 2 can make the memory diverge (spec/deep.md 6).
        weights: W1 (H, D, F), .., WL (H, F, Dv): the memory before the first token, learned; L >= 1, one hidden width F. Of
            "swiglu" each hidden layer has two, gate and value: f(x) = (silu(x W1) * (x U1)) W2 has W1, U1 (H, D, F), W2 (H, F, Dv);
            a deeper one W1, U1, W2, U2, .., WL; L >= 2. A hidden unit is then a column of both and its row of what follows.
        chunk: tokens between two boundaries, >= 1: part of the model, not of its speed.
        read: "post" reads after the token's write, "pre" before it (of the units open to the token, both).
        memory_activation: "gelu_tanh", "silu" or "swiglu".
        surprise_clip: tau > 0 scales u_t by min(1, tau / ||u_t||), the norm over the open entries of all its matrices together
            (spec/deep.md 2.6). The factor is a constant to the outer gradient. None: no limit.
        decay_target: what the weights decay to: "zero" as the paper, or "init": W_t = (1 - alpha_t) W_{t-1} + alpha_t W_0 + S_t,
            where W_0 are the given `weights`, also behind an `initial_state`, which does not hold them (spec/deep.md 1.1).
        residual_norm: gain and bias (H, D), learned outside the memory: it is then x + LN(f(x)), LN a layer norm with these, and
            D = Dv (spec/deep.md 1.3). Open rows of the state then hold v - k as v. None: plain f(x).
        activation: open hidden units of each token, of F (of D for one layer); None: all are open.
        initial_state: state to go on from, in place of `weights` at position 0: what an earlier call returned, or just (weights,
            momentum) of tensors (N, H, in, out), which stand at the activation's offset (0 without one).
        cu_seqlens: int (N + 1,), boundaries of the documents packed in one row (B = 1); memory and position start anew at each.
        output_final_state: return the state behind the last token (of each document) too.
        backend: "auto", "chunk" (the dual form, by chunks), "triton" (the same in GPU kernels), "native" (in C, fp32 on a CPU) or
            "reference" (token by token).

    Returns:
        y (B, T, H, Dv) in v's type; the state of N rows (N = B, or the documents) in fp32 or fp64, or None.

    Raises:
        ValueError: for shapes, options, an activation or boundaries that do not fit each other, or a state that stands elsewhere
            than the activation starts (on CUDA, an assertion on the device).
        TypeError: for tensors that are not floating.
    """
    tokens, weights = (q, k, v, theta, alpha, eta), tuple(weights)
    rows = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
    check_depth(weights, memory_activation)
    _check_tokens(tokens, weights, chunk, read, memory_activation, cu_seqlens)
    check_update(surprise_clip, decay_target)
    check_norm(residual_norm, k, v)
    _check_activation(activation, q, weights, cu_seqlens)
    _check_state(initial_state, tokens, weights, chunk, rows)
    common = {"chunk": chunk, "read": read, "memory_activation": memory_activation, "cu_seqlens": cu_seqlens}
    update = {"surprise_clip": surprise_clip, "decay_target": decay_target, "residual_norm": residual_norm}
    refused = refusals(tokens, weights, chunk, backend, memory_activation=memory_activation, state=initial_state, **update)
    chosen = choose("titans_memory", backend, *tokens, *weights, refused=refused)
    if chosen == "reference":
        more = {"activation": activation, "initial_state": initial_state, "output_final_state": output_final_state}
        return reference.titans_memory(*tokens, weights, **common, **more, **update)
    if residual_norm is not None:
        tokens = (q, k, residual(k, v, compute_dtype(*tokens, *weights)), theta, alpha, eta)
    start, at = _start(tokens, weights, chunk, rows, activation, initial_state)
    options = {
        "kernel": chosen if chosen in ("triton", "native") else None,
        "carried": isinstance(initial_state, TitansState),
        "read": read,
        "memory_activation": memory_activation,
        "clip": surprise_clip,
        "target": weights if decay_target == "init" else (),
        "norm": residual_norm or (),
    }
    active = _active(activation, q, weights, on_host=chosen != "triton")
    out, state = chunk_form(tokens, start, at, active, cu_seqlens, output_final_state, **options)
    return answer(out, q, v.dtype, residual_norm), state


def refusals(
    tokens: Sequence[Tensor],
    weights: Sequence[Tensor],
    chunk: int,
    backend: str = "auto",
    *,
    surprise_clip: float | None = None,
    decay_target: str = "zero",
    residual_norm: Norm | None = None,
    memory_activation: str = "gelu_tanh",
    state: InitialState | None = None,
) -> Known:
    """What `backend.explain` cannot know: by backend, why our kernels do not run inputs (q, k, v, theta, alpha, eta); or None.

    In fp32 the Triton kernels multiply in tf32, which `auto` takes only where PyTorch is allowed to. The C kernel is asked when it
    matters, for it may have to be built to tell.
    """
    update = refused_update(surprise_clip, decay_target, residual_norm, memory_activation)
    refusal = update or triton_deep.refuse(tokens, weights, chunk)
    if refusal is None and backend == "auto" and tokens[0].dtype == torch.float32 and _products_are_exact():
        refusal = "fp32 inputs, and the kernels multiply in tf32; torch.set_float32_matmul_precision('high') allows it"
    start = () if state is None else (*state[0], *state[1])
    return {"triton": refusal, "native": lambda: update or native.refuse(tokens, (*weights, *start), len(weights))}


@torch.compiler.assume_constant_result
def _products_are_exact() -> bool:
    """Whether PyTorch may not multiply in tf32."""
    return torch.get_float32_matmul_precision() == "highest"


def refused_update(
    surprise_clip: float | None, decay_target: str, residual_norm: Norm | None, memory_activation: str
) -> str | None:
    """Why the kernels, of a call or of a step, do not take these options, or None."""
    if memory_function(memory_activation).arity > 1:
        return f"memory_activation is {memory_activation!r}, and the kernels have no gated hidden layer"
    if surprise_clip is not None:
        return f"surprise_clip is {surprise_clip}, and the kernels do not clip"
    if residual_norm is not None:
        return "residual_norm is given, and the kernels have no norm"
    return None if decay_target == "zero" else f"decay_target is {decay_target!r}, and the kernels decay to zero"


def check_depth(weights: Sequence[Tensor], memory_activation: str) -> None:
    """Raise ValueError for an unknown activation, or a number of matrices that makes no memory of it."""
    arity, count = memory_function(memory_activation).arity, len(weights)
    if not count:
        raise ValueError("there are no weights; give at least one layer, W1 (H, D, Dv)")
    if arity > 1 and (count == 1 or count % arity != 1):
        names = ", ".join(matrix_names(arity + 1, arity))
        raise ValueError(
            f"memory_activation is {memory_activation!r} and the memory has {count} matrices; it must have {arity} in each hidden "
            f"layer and one last ({names}; or more layers). A single matrix has no hidden layer: use 'gelu_tanh'"
        )


def check_update(surprise_clip: float | None, decay_target: str) -> None:
    """Raise ValueError for a limit that is no number above 0, or an unknown target."""
    if surprise_clip is not None and not 0 < surprise_clip < float("inf"):
        raise ValueError(f"surprise_clip is {surprise_clip!r}; it must be a number above 0, or None for no limit")
    if decay_target not in DECAY_TARGETS:
        raise ValueError(f"decay_target is {decay_target!r}; it must be one of {', '.join(DECAY_TARGETS)}")


def check_norm(norm: Norm | None, k: Tensor, v: Tensor) -> None:
    """Raise ValueError for gain and bias that are not (H, D), or for values of another width than keys; k, v (.., H, D)."""
    if norm is None:
        return
    shapes, wanted = [tuple(t.shape) for t in norm], [tuple(k.shape[-2:])] * 2
    if k.shape[-1] != v.shape[-1]:
        raise ValueError(
            f"residual_norm is given for keys of {k.shape[-1]} and values of {v.shape[-1]}; x + LN(f(x)) needs one width"
        )
    if shapes != wanted:
        raise ValueError(f"residual_norm has shapes {shapes}; it must be gain and bias (H, D) = {wanted}")


def residual(k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """What a residual memory is given to learn in place of v."""
    return v.to(dtype) - k.to(dtype)


def answer(out: Tensor, q: Tensor, dtype: torch.dtype, norm: Norm | None) -> Tensor:
    """What the memory answers to q (.., H, D), of what its last matrix puts out, in the given type."""
    if norm is None:
        return out
    with torch.autocast(q.device.type, enabled=False):
        gain, bias = (t.to(out.dtype) for t in norm)
        return (q.to(out.dtype) + normalize(out, gain, bias)).to(dtype)


def chunk_form(
    tokens: Sequence[Tensor],
    start: TitansState,
    at: int | Tensor,
    active: Tensor,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    *,
    carried: bool,
    read: str,
    memory_activation: str,
    kernel: str | None = None,
    clip: float | None = None,
    target: Sequence[Tensor] = (),
    norm: Sequence[Tensor] = (),
) -> tuple[Tensor, TitansState | None]:
    """The dual form behind `titans_memory`, of arguments that were checked.

    Args:
        start: the state to start from; `carried` says whether its open rows hold tokens and its position is binding.
        at: int64 (N or 1), position of each row's first token; a number where all rows agree and the host knows it.
        active: int64 (B or 1, T), open coordinates of each token.
        kernel: "triton" or "native": run it by these kernels, which know none of the next; None: by PyTorch.
        clip: limit of a token's gradient, or None.
        target: (H, in, out) of each layer, what the weights decay to; nothing: to zero.
        norm: gain and bias (H, D) of a residual memory: the tokens' v is then `residual`, and the result wants `answer`.
    """
    depth, chunk = len(start.weights), start.k.shape[1]
    earlier = [start.k, start.v, start.theta, start.alpha, start.eta] if carried else []
    target, norm = ([t.to(start.weights[0].dtype) for t in part] for part in (target, norm))
    direct = kernel == "native" and native.direct([*tokens, *start.weights, *start.momentum, *earlier])
    start = start if direct else _each_row(start)
    needed = [*tokens, *start.weights, *start.momentum, *target, *norm, *earlier]
    held, position = (start.active, start.position) if carried else (None, None)
    if kernel == "triton":
        check_position(at, position)
        out = triton_deep.scan(
            tokens, earlier, start.weights, start.momentum, active, held, at, cu_seqlens,
            chunk=chunk, read=read, memory_activation=memory_activation, final=output_final_state,
        )  # fmt: skip
    elif kernel == "native":
        out = native.scan(
            tokens, earlier, start.weights, start.momentum, active, held, at, position, cu_seqlens,
            chunk=chunk, read=read, memory_activation=memory_activation, final=output_final_state, direct=direct,
        )  # fmt: skip
    else:
        offset = torch.tensor([at]) if isinstance(at, int) else at
        keep = torch.is_grad_enabled() and any(t.requires_grad for t in needed)
        out = titans_scan(
            list(tokens), earlier, list(start.weights), list(start.momentum), target, norm, active, held, offset, position,
            cu_seqlens, chunk, read, memory_activation, clip, keep, torch.compiler.is_compiling(),
        )  # fmt: skip
    if not output_final_state:
        return out[0], None
    start = start if carried else _no_open_rows(start, tokens[1:])
    boundary = tuple(out[1 : 1 + depth]), tuple(out[1 + depth : 1 + 2 * depth])
    return out[0], _final(start, boundary, tokens, active, at, chunk, cu_seqlens)


def titans_weights(
    state: TitansState,
    *,
    memory_activation: str = "gelu_tanh",
    surprise_clip: float | None = None,
    initial: Sequence[Tensor] | None = None,
    residual_norm: Norm | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Weights and momentum of the current token: those of the last boundary, and what the open chunk's tokens made of them.

    Args:
        state: as `titans_memory` returned it, called with the same `memory_activation`, `surprise_clip` and `residual_norm`.
        initial: W1 (H, in, out) .. WL, the `weights` of that call, where its decay_target was "init".

    Returns:
        (W1, .., WL), (S1, .., SL), each (N, H, in, out). Gradients flow to every tensor of the state.

    Raises:
        ValueError: for an unknown activation or one that the matrices do not fit, or a limit that is no number above 0.
    """
    check_depth(state.weights, memory_activation)
    check_update(surprise_clip, "zero")
    options = {"surprise_clip": surprise_clip, "initial": initial, "residual_norm": residual_norm}
    return reference.titans_weights(state, memory_activation=memory_activation, **options)


def _start(
    tokens: Sequence[Tensor],
    weights: Sequence[Tensor],
    chunk: int,
    rows: int,
    activation: Activation | None,
    initial: InitialState | None,
) -> tuple[TitansState, int | Tensor]:
    """The state to start from, its boundary in the type to compute in, and the position of each row's first token (N or 1).

    What was not given is left to those who want it: `_each_row` makes a memory for each row, `_no_open_rows` the rest.
    """
    offset = 0 if activation is None else activation.offset
    at = offset.long() if isinstance(offset, Tensor) else offset
    if isinstance(initial, TitansState):
        at = initial.position if activation is None else at
        boundary = initial.weights, initial.momentum
        rest = initial[2:]
    else:
        boundary = initial or (weights, ())
        rest = [tokens[0].new_zeros(()).expand(rows, chunk)] * 7
    dtype = compute_dtype(*tokens, *weights, *boundary[0])
    wide = [tuple(t.to(dtype) for t in part) for part in boundary]
    return TitansState._make([*wide, *rest]), at


def _each_row(start: TitansState) -> TitansState:
    """The state with a memory (N, H, in, out) for each row, and momentum, where one memory is all that was given."""
    if start.momentum:
        return start
    rows = len(start.k)
    weights = tuple(w.expand(rows, *w.shape) for w in start.weights)
    return start._replace(weights=weights, momentum=tuple(w.new_zeros(()).expand_as(w) for w in weights))


def _no_open_rows(start: TitansState, tokens: Sequence[Tensor]) -> TitansState:
    """The state with open rows (N, chunk, ...) of zeros for tokens k, v, theta, alpha, eta."""
    (rows, chunk), zero = start.k.shape[:2], tokens[0].new_zeros(())
    active = torch.zeros(rows, chunk, dtype=torch.int64, device=zero.device)
    return TitansState._make([*start[:2], *(zero.expand(rows, chunk, *t.shape[2:]) for t in tokens), active, start.position])


def _active(activation: Activation | None, q: Tensor, weights: Sequence[Tensor], on_host: bool) -> Tensor:
    """Open coordinates of each token, int64 (B or 1, T).

    On the host, where all rows agree: the chunk form plans there and waits for no device. The kernels plan on the device.
    """
    if activation is None:
        return torch.full((1, q.shape[1]), weights[-1].shape[-2], device="cpu" if on_host else q.device)
    if not on_host or isinstance(activation.offset, Tensor) or activation.cu_seqlens is not None:
        return activation.active
    if native.direct((q,)):
        table = _table(activation.schedule, activation.dim, activation.offset, activation.length)
        return torch.frombuffer(table, dtype=torch.int64)[None]
    return activation.schedule.active(activation.dim, activation.offset + torch.arange(activation.length))[None]


@lru_cache(maxsize=8)
def _table(schedule: ActivationSchedule, dim: int, offset: int, length: int) -> array[int]:
    """Open coordinates of `length` tokens from a position on: the same in every layer and step. No tensor, which has a mode."""
    stretches = schedule.segments(dim, offset, offset + length)
    return array("q", [units for first, past, units in stretches for _ in range(first, past)])


def _positions(at: int | Tensor, rows: int, device: torch.device) -> Tensor:
    """int64 (N,) on the device, of positions (N or 1); a number is no transfer, so that a CUDA graph can hold it."""
    return torch.full((rows,), at, device=device) if isinstance(at, int) else at.to(device).expand(rows)


def _final(
    start: TitansState,
    boundary: tuple[tuple[Tensor, ...], tuple[Tensor, ...]],
    tokens: Sequence[Tensor],
    active: Tensor,
    at: int | Tensor,
    chunk: int,
    cu_seqlens: Tensor | None,
) -> TitansState:
    """The state behind the last token: its open rows are the tokens since the last boundary, of this call or of the one before."""
    rows, (batch, length) = len(start.k), tokens[0].shape[:2]
    device = tokens[0].device
    begin = _positions(at, rows, device)
    everywhere = active.to(device).expand(batch, length)
    news = (*tokens[1:], everywhere)
    if cu_seqlens is None and isinstance(at, int):
        parts = [_tail(old, new, at, boundary[0][0].dtype) for old, new in zip(start[2:8], news)]
        return TitansState._make([*boundary, *parts, begin + length])
    if cu_seqlens is None:
        first, count = torch.arange(rows, device=device) * length, torch.full((rows,), length, device=device)
    else:
        first, count = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    end = begin + count
    place = (end - end % chunk)[:, None] + torch.arange(chunk, device=device)
    earlier, taken = place < begin[:, None], place < end[:, None]
    index = (first[:, None] + place - begin[:, None]).clamp(min=0, max=batch * length - 1)
    parts = []
    for old, new in zip(start[2:8], news):
        value = new.flatten(0, 1)[index]
        value = value if old.dtype == torch.int64 else value.to(boundary[0][0].dtype)
        shape = (rows, chunk, *[1] * (value.dim() - 2))
        value = torch.where(earlier.view(shape), old.to(value.dtype), value)
        parts.append(torch.where(taken.view(shape), value, torch.zeros((), dtype=value.dtype, device=device)))
    return TitansState._make([*boundary, *parts, end])


def _tail(old: Tensor, new: Tensor, begin: int, dtype: torch.dtype) -> Tensor:
    """Open rows (N, chunk, ...) behind tokens (N, T, ...) that start at position `begin` of each row, after the open rows `old`."""
    chunk, length = old.shape[1], new.shape[1]
    dtype = old.dtype if old.dtype == torch.int64 else dtype
    filled = (begin + length) % chunk
    if not filled:
        return old.new_zeros(old.shape, dtype=dtype)
    now = min(filled, length)
    parts = [old[:, : filled - now].to(dtype), new[:, length - now :].to(dtype), old.new_zeros(1, dtype=dtype)]
    parts[2] = parts[2].expand(len(old), chunk - filled, *old.shape[2:])
    return torch.cat(parts, 1)


def _check_tokens(
    tokens: Sequence[Tensor], weights: Sequence[Tensor], chunk: int, read: str, memory_activation: str, cu_seqlens: Tensor | None
) -> None:
    q, k, v, *gates = tokens
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise ValueError(f"chunk is {chunk!r}; it must be a whole number of at least 1")
    if read not in READS:
        raise ValueError(f"read is {read!r}; it must be one of {', '.join(READS)}")
    for name, tensor in zip(("q", "k", "v", "theta", "alpha", "eta"), tokens):
        check_floating(name, tensor.dtype)
    if q.dim() != 4 or k.shape != q.shape or v.dim() != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; they must be (B, T, H, D), the same, and (B, T, H, Dv)"
        )
    if q.shape[0] == 0 or q.shape[1] == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}; there must be at least one row and one token")
    for name, gate in zip(("theta", "alpha", "eta"), gates):
        if gate.shape != q.shape[:3]:
            raise ValueError(f"{name} has shape {tuple(gate.shape)}; it must be (B, T, H) = {tuple(q.shape[:3])}")
    _check_packed(q, cu_seqlens)
    heads, hidden = q.shape[2], weights[0].shape[-1]
    count, arity = len(weights), memory_function(memory_activation).arity
    for weight, place, name in zip(weights, places(count, arity), matrix_names(count, arity)):
        rows = q.shape[3] if place == "first" or count == 1 else hidden
        wanted = heads, rows, v.shape[3] if place == "last" else hidden
        if tuple(weight.shape) != wanted:
            raise ValueError(
                f"{name} has shape {tuple(weight.shape)}; of these {count} matrices it must be (H, in, out) = {wanted}, "
                "with one hidden width"
            )


def _check_packed(q: Tensor, cu_seqlens: Tensor | None) -> None:
    check_packed(len(q), cu_seqlens)
    if cu_seqlens is None:
        return
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; it must be integers (documents + 1,)"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device} and q on {q.device}; move it there")


def _check_activation(activation: Activation | None, q: Tensor, weights: Sequence[Tensor], cu_seqlens: Tensor | None) -> None:
    if activation is None:
        return
    units = weights[-1].shape[-2]
    if activation.dim != units or activation.length != q.shape[1]:
        raise ValueError(
            f"the activation describes {activation.dim} coordinates and {activation.length} tokens; the memory opens {units} "
            f"{'hidden units' if len(weights) > 1 else 'key rows'} and the call has {q.shape[1]} tokens"
        )
    if (activation.cu_seqlens is None) != (cu_seqlens is None):
        raise ValueError("cu_seqlens was given to only one of the call and its activation; give it to both")
    if cu_seqlens is None:
        if isinstance(activation.offset, Tensor) and len(activation.offset) not in (1, len(q)):
            raise ValueError(f"the activation has {len(activation.offset)} offsets for {len(q)} rows; give one a row")
    elif activation.cu_seqlens is not cu_seqlens and not torch.compiler.is_compiling():
        theirs = activation.cu_seqlens
        if theirs is None or len(theirs) != len(cu_seqlens) or not torch.equal(theirs.to(cu_seqlens), cu_seqlens):
            raise ValueError(f"the activation is packed as {theirs} and the call as {cu_seqlens}; give both the same cu_seqlens")


def _check_state(state: InitialState | None, tokens: Sequence[Tensor], weights: Sequence[Tensor], chunk: int, rows: int) -> None:
    if state is None:
        return
    if not isinstance(state, tuple) or len(state) not in (2, len(TitansState._fields)):
        raise ValueError(f"initial_state is a {type(state).__name__}; it must be a TitansState, or (weights, momentum)")
    for name, part in zip(("weights", "momentum"), state):
        shapes = [tuple(t.shape) for t in part]
        wanted = [(rows, *w.shape) for w in weights]
        if shapes != wanted:
            raise ValueError(f"initial_state has {name} of shapes {shapes}; they must be (N, H, in, out) = {wanted}")
    if isinstance(state, TitansState):
        for name, old, new in zip(("k", "v", "theta", "alpha", "eta"), state[2:7], tokens[1:]):
            if old.shape[1] != chunk:
                raise ValueError(f"initial_state was made with chunk={old.shape[1]}, this call has chunk={chunk}; use the same")
            if tuple(old.shape) != (rows, chunk, *new.shape[2:]):
                raise ValueError(
                    f"initial_state has {name} of shape {tuple(old.shape)}; it must be {(rows, chunk, *new.shape[2:])}"
                )
