# ruff: noqa: ANN001 -- the fake implementations repeat the signature above them
"""The C kernel as one operator that torch.compile does not look into, and its gradient as another."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from functools import lru_cache
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import torch
from torch import Tensor

from proteus_lm.ops._deep_scan import check_position
from proteus_lm.ops.native import build
from proteus_lm.ops.rows import Rows

KEPT = 1 << 28  # bytes of tape kept for the backward of one call; it works out again what lies behind them
GROUP = 8  # as in titans.c: chunks between two states that are saved where a tape is not
_FAILED = {1: "no memory for the kernel's work", 2: "the saved tensor is too small for these tokens: a fault of the kernel"}

_POINTER = ctypes.c_void_p


class Arguments(ctypes.Structure):
    """`Args` of titans.c, field by field."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("rows", "tokens", "all", "heads", "chunk", "dk", "dv", "hidden", "pre", "silu", "threads", "active_rows", "save"),
                *("limit", "room"),
            )
        ),
        ("q", _POINTER), ("k", _POINTER), ("v", _POINTER), ("gate", _POINTER * 3),
        ("open_k", _POINTER), ("open_v", _POINTER), ("open_gate", _POINTER * 3),
        ("active", _POINTER), ("open_active", _POINTER), ("first", _POINTER), ("length", _POINTER), ("phase", _POINTER),
        ("start", _POINTER * 4), ("start_row", ctypes.c_int64 * 4), ("state", _POINTER * 4), ("y", _POINTER), ("saved", _POINTER),
        ("dy", _POINTER), ("d_end", _POINTER * 4), ("parallel", _POINTER),
        ("d_state", _POINTER * 4), ("dq", _POINTER), ("dk_", _POINTER), ("dv_", _POINTER), ("d_gate", _POINTER * 3),
        ("d_open_k", _POINTER), ("d_open_v", _POINTER), ("d_open_gate", _POINTER * 3),
    )  # fmt: skip


@lru_cache(maxsize=1)
def _parallel() -> int | None:
    """The address of the OpenMP runtime's `GOMP_parallel` that PyTorch brought into this process (also in LLVM's and Intel's), or
    None: the kernel then starts threads of its own."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, _POINTER).value
    except (AttributeError, OSError):
        return None


class Call:
    """The arguments of one call, and the tensors they point into, which live as long.

    Args:
        tokens, open_rows, active, open_active, offset, cu_seqlens, chunk, read, memory_activation: as for `titans_native`.
        state: W1, W2, S1, S2 at the start.  save: whether tapes are, or were, kept.

    Raises:
        ValueError: for boundaries that do not fit the tokens.
    """

    def __init__(
        self,
        tokens: Sequence[Tensor],
        open_rows: Sequence[Tensor],
        state: Sequence[Tensor],
        active: Tensor,
        open_active: Tensor | None,
        offset: Tensor,
        cu_seqlens: Tensor | None,
        chunk: int,
        read: str,
        memory_activation: str,
        save: bool,
    ) -> None:
        q, _, v = tokens[:3]
        rows, length = state[0].shape[0], q.shape[1]
        firsts, lengths = [row * length for row in range(rows)], [length] * rows
        if cu_seqlens is not None:
            firsts, lengths = cu_seqlens[:-1].tolist(), Rows(cu_seqlens, length).lengths.tolist()
        phases = [position % chunk for position in offset.tolist()]
        self._alive: list[Tensor] = []
        self.arguments = a = Arguments(
            rows=rows, tokens=length, all=q.shape[0] * length, heads=q.shape[2], chunk=chunk, dk=q.shape[3], dv=v.shape[3],
            hidden=state[0].shape[-1], pre=read == "pre", silu=memory_activation == "silu", save=save,
            threads=torch.get_num_threads(), active_rows=len(active), limit=KEPT // 4, parallel=_parallel(),
        )  # fmt: skip
        self.put(("q", "k", "v"), tokens[:3])
        self.put("gate", tokens[3:])
        if open_rows:
            self.put(("open_k", "open_v"), open_rows[:2])
            self.put("open_gate", open_rows[2:])
            assert open_active is not None
            self.put(("open_active",), [open_active])
        self.put(("active",), [active])
        self._rows = [(ctypes.c_int64 * rows)(*values) for values in (firsts, lengths, phases * (rows // len(phases)))]
        a.first, a.length, a.phase = (ctypes.cast(values, _POINTER) for values in self._rows)
        state = [t if t[0].is_contiguous() else t.contiguous() for t in state]  # rows of one memory need no copies of it
        a.start_row = (ctypes.c_int64 * 4)(*(t.stride(0) for t in state))
        self._point("start", state)

    def room(self) -> int:
        """Numbers to keep for the backward."""
        return build.library().titans_room(ctypes.byref(self.arguments))

    def put(self, names: str | Sequence[str], tensors: Sequence[Tensor]) -> None:
        """Point fields at tensors, or one field that is an array."""
        self._point(names, [t.contiguous() for t in tensors])

    def _point(self, names: str | Sequence[str], tensors: Sequence[Tensor]) -> None:
        self._alive += tensors
        pointers = [t.data_ptr() or None for t in tensors]  # an empty tensor is none
        if isinstance(names, str):
            setattr(self.arguments, names, (_POINTER * len(pointers))(*pointers))
            return
        for name, pointer in zip(names, pointers, strict=True):
            setattr(self.arguments, name, pointer)

    def keep_in(self, saved: Tensor) -> None:
        """What the forward leaves to the backward."""
        self.arguments.room = len(saved)
        self.put(("saved",), [saved])

    def run(self, function: str) -> None:
        """Call the kernel; other Python threads go on meanwhile.

        Raises:
            MemoryError: where it finds none.
        """
        code = getattr(build.library(), function)(ctypes.byref(self.arguments))
        if code:
            raise MemoryError(_FAILED[code])


def most_room(rows: int, tokens: Tensor, v: Tensor, hidden: int, chunk: int) -> int:
    """Numbers that suffice for `saved` whatever the positions and documents: what a compiled graph can know.

    Args:
        rows: N.  tokens, v: q and v of the call.
    """
    wide, dv = _step(hidden), _step(v.shape[-1])
    state = 2 * (tokens.shape[-1] * wide + hidden * dv) + 16
    tape = state + chunk * wide + chunk * _step(chunk) + chunk * dv
    length, heads = tokens.shape[0] * tokens.shape[1], tokens.shape[2]
    chunks = heads * (length // chunk + 2 * rows)
    most = torch.sym_min(chunks * tape, KEPT // 4)
    return most + state * heads * ((length + rows * (chunk - 1)) // (chunk * GROUP))  # pyright: ignore


def _step(size: int) -> int:
    """Numbers from one row of a matrix to the next, at most."""
    return -(-size // 16) * 16 + 16


_free: list[mmap] = []
"""Memory of tapes that are done with, up to `KEPT` bytes: to touch as much anew takes a fifth of a forward's time."""


def _uncleared(size: int) -> Tensor:
    """An fp32 tensor (size) of what was there, unlike `torch.empty` also under `use_deterministic_algorithms`: the backward reads
    only what the forward wrote, and to fill this much would take a third of the forward's time."""
    if not size:
        return torch.empty(0)
    memory = next((m for m in _free if len(m) >= 4 * size), None)
    if memory is None:
        memory = mmap(-1, 4 * size, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    else:
        _free.remove(memory)
    view = (ctypes.c_char * (4 * size)).from_buffer(memory)
    weakref.finalize(view, _give_back, memory).atexit = False  # when the tensor is gone, wherever autograd kept it
    return torch.frombuffer(view, dtype=torch.float32)


def _give_back(memory: mmap) -> None:
    if sum(map(len, _free)) + len(memory) <= KEPT:
        _free.append(memory)


@torch.library.custom_op("proteus_lm::titans_native", mutates_args=())
def titans_native(
    tokens: list[Tensor],
    open_rows: list[Tensor],
    weights: list[Tensor],
    momentum: list[Tensor],
    active: Tensor,
    open_active: Tensor | None,
    offset: Tensor,
    position: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk: int,
    read: str,
    memory_activation: str,
    save: bool,
    static: bool,
) -> list[Tensor]:
    """Read and write an MLP memory of two layers along rows of tokens, all fp32 on the CPU.

    Args:
        tokens: q, k (B, T, H, D), v (B, T, H, Dv), theta, alpha, eta (B, T, H).
        open_rows: k, v (N, chunk, H, .), theta, alpha, eta (N, chunk, H), tokens of earlier calls since the boundary; or nothing.
        weights, momentum: W1, W2, S1, S2 at the last boundary, (N, H, in, out) each.
        active: int64 (B or 1, T), open units at each token.  open_active: int64 (N, chunk), at each open row.
        offset: int64 (N or 1), position of each row's first token.  position: int64 (N), what it must be, where known.
        cu_seqlens: int (N + 1), where B = 1 row holds N documents.
        save: keep what the backward needs.  static: give it the largest size, as compilation wants, rather than that in use.

    Returns:
        y (B, T, H, Dv); W1, W2, S1, S2 at each row's last boundary; with `save`, one flat tensor for the backward.

    Raises:
        ValueError: for boundaries that do not fit the tokens, or an offset that is not the position.
        MemoryError: where the kernel finds none.
    """
    check_position(offset, position)
    start = [*weights, *momentum]
    call = Call(tokens, open_rows, start, active, open_active, offset, cu_seqlens, chunk, read, memory_activation, save)
    y, *state = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (tokens[2], *start))
    call.put(("y",), [y])
    call.put("state", state)
    if not save:
        call.run("titans_forward")
        return [y, *state]
    room = most_room(len(state[0]), tokens[0], tokens[2], state[0].shape[-1], chunk) if static else call.room()
    saved = _uncleared(room)
    call.keep_in(saved)
    call.run("titans_forward")
    return [y, *state, saved]


@torch.library.custom_op("proteus_lm::titans_native_backward", mutates_args=())
def titans_native_backward(
    grads: list[Tensor],
    tokens: list[Tensor],
    open_rows: list[Tensor],
    weights: list[Tensor],
    momentum: list[Tensor],
    saved: Tensor,
    active: Tensor,
    open_active: Tensor | None,
    offset: Tensor,
    cu_seqlens: Tensor | None,
    chunk: int,
    read: str,
    memory_activation: str,
) -> list[Tensor]:
    """Gradients to tokens, open_rows, weights and momentum, in this order, from those to y and the state at the end, of which an
    empty tensor stands for zeros."""
    start = [*weights, *momentum]
    call = Call(tokens, open_rows, start, active, open_active, offset, cu_seqlens, chunk, read, memory_activation, True)
    to_tokens = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tokens]
    to_open = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in open_rows]
    to_state = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in start]
    call.keep_in(saved)
    call.put(("dy",), grads[:1])
    call.put("d_end", grads[1:])
    call.put("d_state", to_state)
    call.put(("dq", "dk_", "dv_"), to_tokens[:3])
    call.put("d_gate", to_tokens[3:])
    if to_open:
        call.put(("d_open_k", "d_open_v"), to_open[:2])
        call.put("d_open_gate", to_open[2:])
    call.run("titans_backward")
    return [*to_tokens, *to_open, *to_state]


@titans_native.register_fake
def _(tokens, open_rows, weights, momentum, active, open_active, offset, position, cu_seqlens, chunk, read, function, save, static):
    state = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (*weights, *momentum)]
    room = most_room(weights[0].shape[0], tokens[0], tokens[2], weights[0].shape[-1], chunk)
    saved = [tokens[0].new_empty(room)] if save else []
    return [torch.empty_like(tokens[2], memory_format=torch.contiguous_format), *state, *saved]


@titans_native_backward.register_fake
def _(grads, tokens, open_rows, weights, momentum, *rest):
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (*tokens, *open_rows, *weights, *momentum)]


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    *lists, active, open_active, offset, _, cu_seqlens, chunk, read, memory_activation, _, _ = inputs
    ctx.counts, ctx.options = [len(part) for part in lists], (chunk, read, memory_activation)
    ctx.save_for_backward(*(t for part in lists for t in part), output[-1], active, open_active, offset, cu_seqlens)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple:
    flat = list(ctx.saved_tensors)
    lists = [[flat.pop(0) for _ in range(count)] for count in ctx.counts]
    tokens, _, weights, momentum = lists
    to_y = torch.zeros_like(tokens[2]) if grads[0] is None else grads[0]
    given = [to_y, *(to_y.new_empty(0) if g is None else g for g in grads[1 : 1 + len(weights) + len(momentum)])]
    out = iter(titans_native_backward(given, *lists, *flat, *ctx.options))
    return (*([next(out) for _ in range(count)] for count in ctx.counts), *[None] * 10)


titans_native.register_autograd(_gradients, setup_context=_setup)
