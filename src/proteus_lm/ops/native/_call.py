"""A call of the C kernel, forward or backward: arguments as `Args` of titans.c wants them, and the tensors that it fills."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from proteus_lm.ops.native import build
from proteus_lm.ops.native._memory import uncleared
from proteus_lm.ops.rows import Rows

TAPES = 1 << 28  # bytes of tape kept for the backward of one call; it works out again what lies behind them
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
        ("d_state", _POINTER * 4), ("d_shared", _POINTER * 4), ("dq", _POINTER), ("dk_", _POINTER), ("dv_", _POINTER),
        ("d_gate", _POINTER * 3), ("d_open_k", _POINTER), ("d_open_v", _POINTER), ("d_open_gate", _POINTER * 3),
    )  # fmt: skip


@lru_cache(maxsize=1)
def _parallel() -> int | None:
    """The address of the OpenMP runtime's `GOMP_parallel` that PyTorch brought into this process (also in LLVM's and Intel's), or
    None: the kernel then starts threads of its own."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, _POINTER).value
    except (AttributeError, OSError):
        return None


class Walk(NamedTuple):
    """What a call is besides its tensors: of each row the first token among all B * T, the tokens, the slot of the first in its
    chunk; and options of `titans_memory`."""

    firsts: list[int]
    lengths: list[int]
    phases: list[int]
    chunk: int
    read: str
    memory_activation: str


def walk(
    q: Tensor, rows: int, offset: int | Tensor, cu_seqlens: Tensor | None, chunk: int, read: str, memory_activation: str
) -> Walk:
    """The walk along rows of q (B, T, H, D) from `offset`, the position of each row's first token: int64, N or 1.

    Raises:
        ValueError: for boundaries that do not fit the tokens.
    """
    length = q.shape[1]
    firsts, lengths = [row * length for row in range(rows)], [length] * rows
    if cu_seqlens is not None:
        firsts, lengths = cu_seqlens[:-1].tolist(), Rows(cu_seqlens, length).lengths.tolist()
    phases = [position % chunk for position in ([offset] if isinstance(offset, int) else offset.tolist())]
    return Walk(firsts, lengths, phases * (rows // len(phases)), chunk, read, memory_activation)


class Inputs(NamedTuple):
    """What is given to a call, forward or backward: tensors as in `_operator.titans_native`.

    `start`: W1, W2, S1, S2 (N, H, in, out), or W1, W2 (H, in, out) of a memory that all rows start from, without momentum.
    """

    tokens: Sequence[Tensor]
    open_rows: Sequence[Tensor]
    start: Sequence[Tensor]
    active: Tensor
    open_active: Tensor | None
    walk: Walk


class Call:
    """The arguments of one call, and the tensors they point into, which live as long.

    Args:
        save: whether tapes are, or were, kept.
    """

    def __init__(self, given: Inputs, save: bool) -> None:
        tokens, open_rows, start, active, open_active, walk = given
        q, _, v = tokens[:3]
        rows = len(walk.firsts)
        self._alive: list[Tensor] = []
        self.arguments = a = Arguments(
            rows=rows, tokens=q.shape[1], all=q.shape[0] * q.shape[1], heads=q.shape[2], chunk=walk.chunk, dk=q.shape[3],
            dv=v.shape[3], hidden=start[0].shape[-1], pre=walk.read == "pre", silu=walk.memory_activation == "silu", save=save,
            threads=torch.get_num_threads(), active_rows=len(active), limit=TAPES // 4, parallel=_parallel(),
        )  # fmt: skip
        self.put(("q", "k", "v"), tokens[:3])
        self.put("gate", tokens[3:])
        if open_rows:
            self.put(("open_k", "open_v", "open_active"), [*open_rows[:2], open_active])
            self.put("open_gate", open_rows[2:])
        self.put(("active",), [active])
        self._rows = [(ctypes.c_int64 * rows)(*values) for values in walk[:3]]
        a.first, a.length, a.phase = (ctypes.addressof(values) for values in self._rows)
        start = [t if t[0].is_contiguous() else t.contiguous() for t in start]  # rows of one memory need no copies of it
        a.start_row = (ctypes.c_int64 * 4)(*(t.stride(0) if t.dim() == 4 else 0 for t in start))
        self._point("start", start)

    def room(self) -> int:
        """Numbers to keep for the backward."""
        return build.library().titans_room(ctypes.byref(self.arguments))

    def put(self, names: str | Sequence[str], tensors: Sequence[Tensor | None]) -> None:
        """Point fields at tensors, or one field that is an array. None, and an empty tensor, is no pointer."""
        self._point(names, [None if t is None else t.contiguous() for t in tensors])

    def _point(self, names: str | Sequence[str], tensors: Sequence[Tensor | None]) -> None:
        self._alive += (t for t in tensors if t is not None)
        pointers = [None if t is None else t.data_ptr() or None for t in tensors]
        if isinstance(names, str):
            setattr(self.arguments, names, type(getattr(self.arguments, names))(*pointers))  # NULL behind the last
            return
        for name, pointer in zip(names, pointers, strict=True):
            setattr(self.arguments, name, pointer)

    def keep_in(self, saved: Tensor) -> None:
        """What the forward leaves to the backward."""
        self.arguments.room = len(saved)
        self._point(("saved",), [saved])

    def run(self, function: str) -> None:
        """Call the kernel; other Python threads go on meanwhile.

        Raises:
            MemoryError: where it finds none.
        """
        code = getattr(build.library(), function)(ctypes.byref(self.arguments))
        if code:
            raise MemoryError(_FAILED[code])


def forward(given: Inputs, *, final: bool, save: bool, room: int | None = None) -> list[Tensor]:
    """Read and write the memory.

    Args:
        final: give the state at each row's last boundary too.  save: keep what the backward needs, in a tensor of `room` numbers;
            of just enough without.

    Returns:
        y (B, T, H, Dv); with `final`, W1, W2, S1, S2 (N, H, in, out); with `save`, one flat tensor for the backward.

    Raises:
        MemoryError: where the kernel finds none.
    """
    call = Call(given, save)
    rows, shapes = len(given.walk.firsts), [t.shape[-3:] for t in given.start[:2]]
    out = [uncleared(given.tokens[2].shape), *(uncleared((rows, *shape)) for shape in (*shapes, *shapes) if final)]
    call.put(("y",), out[:1])
    if final:
        call.put("state", out[1:])
    if save:
        out.append(uncleared((call.room() if room is None else room,)))
        call.keep_in(out[-1])
    call.run("titans_forward")
    return out


def backward(given: Inputs, saved: Tensor, grads: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Gradients to tokens, open_rows and start, in this order.

    Args:
        saved: what `forward` kept.  grads: to its y and, where it gave it, to the state; None, or of the state an empty tensor,
            stands for zeros.  wanted: of each tensor of the start, whether there is to be a gradient, and not None.

    Raises:
        MemoryError: where the kernel finds none.
    """
    call = Call(given, True)
    to_tokens = [uncleared(t.shape) for t in given.tokens]
    to_open = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in given.open_rows]
    to_start = [uncleared(t.shape) if want else None for t, want in zip(given.start, wanted, strict=True)]
    shared, rows = given.start[0].dim() == 3, len(given.walk.firsts)
    by_row = [None if t is None or not shared else uncleared((rows, *t.shape)) for t in to_start]
    call.keep_in(saved)
    call.put(("dy",), [torch.zeros_like(given.tokens[2]) if grads[0] is None else grads[0]])
    if grads[1:]:
        call.put("d_end", grads[1:])
    call.put("d_state", by_row if shared else to_start)
    if shared:
        call.put("d_shared", to_start)
    call.put(("dq", "dk_", "dv_"), to_tokens[:3])
    call.put("d_gate", to_tokens[3:])
    if to_open:
        call.put(("d_open_k", "d_open_v"), to_open[:2])
        call.put("d_open_gate", to_open[2:])
    call.run("titans_backward")
    return [*to_tokens, *to_open, *to_start]


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
    most = torch.sym_min(chunks * tape, TAPES // 4)
    return most + state * heads * ((length + rows * (chunk - 1)) // (chunk * GROUP))  # pyright: ignore


def _step(size: int) -> int:
    """Numbers from one row of a matrix to the next, at most."""
    return -(-size // 16) * 16 + 16
