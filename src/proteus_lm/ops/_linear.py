"""What every linear rule does with its arguments: check them, choose a backend, carry the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from proteus_lm.activation import Activation
from proteus_lm.ops import fla, reference, triton
from proteus_lm.ops._linear_operator import INPUTS, compute_dtype, linear_chunk
from proteus_lm.ops.backend import Known, choose
from proteus_lm.ops.rows import check_floating, check_packed
from proteus_lm.ops.state import SWLAState

ARGUMENTS = {
    "retention": ("q", "k", "v", "g"),
    "swla": ("q", "k", "v", "g", "gamma"),
    "delta_rule": ("q", "k", "v", "beta"),
    "gated_delta_rule": ("q", "k", "v", "g", "beta"),
    "comba": ("q", "k", "v", "p", "g", "beta"),
}
# Backends that take an operation as a whole, under its own name and arguments.
WHOLE = {"reference": reference, "triton": triton}
# Tokens in a tile, at most: a processor gains from less work within tiles, other devices from fewer steps between them.
TILES = {"cpu": 32}
OTHER_TILES = 64
AXES = ("key", "value")
READS = ("post", "pre")

State = Tensor | SWLAState


def run(
    operation: str,
    values: Sequence[Tensor],
    activation: Activation | None,
    axis: str,
    scale: float | None,
    read: str,
    initial_state: State | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    backend: str,
) -> tuple[Tensor, Any]:
    """A linear rule by the backend chosen.

    Args:
        operation: name of the rule, as in `proteus_lm.ops` and `proteus_lm.ops.reference`.
        values: the rule's tensors, in the order of `ARGUMENTS`.

    Returns:
        out (B, T, H, V) in v's type; the state behind the last token (of each document), or None unless asked for.

    Raises:
        ValueError, TypeError: for arguments that do not fit each other; see `check`.
    """
    tensors = dict(zip(ARGUMENTS[operation], values))
    check_choice("read", read, READS)
    check(operation, tensors, activation, axis, initial_state, cu_seqlens)
    chosen = choose(operation, backend, *values, refused=_refused(operation, values, activation, read, initial_state))
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if chosen in WHOLE or chosen == "fla":
        keywords = {
            "activation": activation,
            "axis": axis,
            "scale": scale,
            "initial_state": initial_state,
            "cu_seqlens": cu_seqlens,
            "output_final_state": output_final_state,
        }
        if chosen == "fla":
            return fla.run(operation, tensors, **keywords)
        more = {"read": read} if chosen == "reference" else {}  # the kernels have one read
        return getattr(WHOLE[chosen], operation)(*values, **keywords, **more)
    window = tensors["gamma"].shape[-1] - 1 if operation == "swla" else 0
    state = _initial(initial_state, tensors, window, cu_seqlens)
    rule = "gated_delta_rule" if operation == "delta_rule" else operation  # the gated rule with a decay of 1
    named = {"g": torch.zeros_like(tensors["beta"])} if operation == "delta_rule" else {}
    named |= tensors | {"state": state.matrix, "window_k": state.keys, "window_v": state.values}
    inputs = [named[name] for name in INPUTS[rule]]
    size = TILES.get(q.device.type, OTHER_TILES)
    out, matrix = linear_chunk(inputs, _active(activation), cu_seqlens, rule, axis == "key", read == "pre", scale, size)
    if not output_final_state:
        return out, None
    if operation != "swla":
        return out, matrix
    return out, SWLAState(matrix, *(_tail(w, x.to(matrix.dtype), cu_seqlens) for w, x in zip(state[1:], (k, v))))


def _refused(
    operation: str, values: Sequence[Tensor], activation: Activation | None, read: str, initial_state: State | None
) -> Known:
    """What speaks against a backend beside the tensors; fla is asked only where it is its turn, for that may import it."""
    if read == "pre":
        return dict.fromkeys(("triton", "fla"), "its kernels have no read 'pre'")
    return {"fla": lambda: fla.refuse_state(operation, tuple(values), initial_state, activation)}


def _active(activation: Activation | None) -> Tensor | None:
    """Open coordinates at each token, on the host where all rows agree, so that planning waits for no device."""
    if activation is None or activation.schedule.blocks == 1:
        return None
    if isinstance(activation.offset, Tensor) or activation.cu_seqlens is not None:
        return activation.active
    return activation.schedule.activation(activation.dim, activation.length, offset=activation.offset, device="cpu").active


def _initial(given: State | None, tensors: dict[str, Tensor], window: int, cu_seqlens: Tensor | None) -> SWLAState:
    """The state to start from, zeros where none is given; an empty window for the rules that have none."""
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    count = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
    dtype = compute_dtype(*tensors.values(), *([] if given is None else [given] if isinstance(given, Tensor) else given))
    if isinstance(given, SWLAState):
        return SWLAState(*(x.to(dtype) for x in given))
    matrix = q.new_zeros(count, q.shape[2], k.shape[-1], v.shape[-1], dtype=dtype) if given is None else given
    return SWLAState(matrix, *(x.new_zeros(count, window, *x.shape[2:], dtype=dtype) for x in (k, v)))


def _tail(window: Tensor, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The last tokens of each document, as many as `window` (N, c - 1, H, D) holds of those before it. x: (B, T, H, D)."""
    size = window.shape[1]
    if cu_seqlens is None:
        recent = x[:, max(x.shape[1] - size, 0) :]
        return torch.cat((window[:, recent.shape[1] :], recent), 1)
    at = cu_seqlens[1:, None].long() + torch.arange(-size, 0, device=x.device)
    missing = cu_seqlens[:-1, None] - at  # tokens before the document's first one
    older = window.gather(1, (size - missing).clamp(0, max(size - 1, 0))[..., None, None].expand_as(window))
    return torch.where((missing > 0)[..., None, None], older, x[0][at.clamp(min=0)])


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def check(
    operation: str,
    tensors: dict[str, Tensor],
    activation: Activation | None,
    axis: str,
    initial_state: State | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Raise on arguments that do not fit each other.

    Raises:
        ValueError: for shapes, devices, an axis, boundaries or an activation that do not fit.
        TypeError: for tensors that are not floating, or a state of another rule.
    """
    check_choice("axis", axis, AXES)
    q, v = tensors["q"], tensors["v"]
    for name, x in (("q", q), ("v", v)):
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(f"{name} is of shape {tuple(x.shape)}; it must be (batch, tokens, heads, features), none of them 0")
    token = tuple(q.shape[:3])
    window = tensors["gamma"].shape[-1] if "gamma" in tensors and tensors["gamma"].dim() == 4 else 1
    right = {"k": q.shape, "p": q.shape, "v": (*token, v.shape[-1]), "gamma": (*token, max(window, 1))}
    for name, x in tensors.items():
        _check_tensor(name, x, right.get(name, q.shape if name == "q" else token), q.device)
    check_packed(len(q), cu_seqlens)
    if cu_seqlens is not None:
        _check_boundaries(cu_seqlens, q.device)
    if activation is not None:
        _check_activation(activation, axis, q, v, cu_seqlens)
    if initial_state is not None:
        _check_state(operation, initial_state, q, v, window, cu_seqlens)


def _check_tensor(name: str, x: Tensor, shape: Sequence[int], device: torch.device) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} is of shape {tuple(x.shape)}; with this q and v it must be {tuple(shape)}")
    check_floating(name, x.dtype)
    if x.device != device:
        raise ValueError(f"{name} is on {x.device} and q on {device}; move it there")


def _check_boundaries(cu_seqlens: Tensor, device: torch.device) -> None:
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; it must be integers (documents + 1,)"
        )
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device} and q on {device}; move it there")


def _check_activation(activation: Activation, axis: str, q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> None:
    batch, tokens = q.shape[:2]
    dim = (q if axis == "key" else v).shape[-1]
    if activation.dim != dim:
        raise ValueError(f"activation is of {activation.dim} coordinates; axis={axis!r} has {dim}")
    if activation.length != tokens:
        raise ValueError(f"activation is of {activation.length} tokens and q of {tokens}; make it for this call's tokens")
    if (activation.cu_seqlens is None) != (cu_seqlens is None):
        raise ValueError("activation and operation must be given the same cu_seqlens: one has it, the other not")
    if cu_seqlens is None:
        if isinstance(activation.offset, Tensor) and len(activation.offset) not in (1, batch):
            raise ValueError(f"activation has {len(activation.offset)} offsets for {batch} rows; give one a row")
    elif activation.cu_seqlens is not cu_seqlens and not torch.compiler.is_compiling():
        theirs = activation.cu_seqlens
        if theirs is None or len(theirs) != len(cu_seqlens) or not bool((theirs.to(cu_seqlens.device) == cu_seqlens).all()):
            raise ValueError(f"activation is packed as {theirs} and the operation as {cu_seqlens}; give both the same cu_seqlens")


def _check_state(operation: str, state: State, q: Tensor, v: Tensor, window: int, cu_seqlens: Tensor | None) -> None:
    count = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
    if not isinstance(state, Tensor) and (operation != "swla" or not isinstance(state, SWLAState)):
        wanted = "a matrix (N, H, K, V) or an SWLAState" if operation == "swla" else "a matrix (N, H, K, V)"
        raise TypeError(f"initial_state is a {type(state).__name__}; {operation} carries {wanted}")
    heads, keys, values = q.shape[2], q.shape[-1], v.shape[-1]
    matrix = state if isinstance(state, Tensor) else state.matrix
    _check_tensor("initial_state", matrix, (count, heads, keys, values), q.device)
    if isinstance(state, SWLAState):
        _check_tensor("initial_state.keys", state.keys, (count, window - 1, heads, keys), q.device)
        _check_tensor("initial_state.values", state.values, (count, window - 1, heads, values), q.device)
