"""Memory of large tensors that are done with, kept for the next: to touch as much anew costs a fifth of a forward's time."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor

KEPT = 1 << 28  # bytes kept at most
LARGE = 1 << 20  # bytes; below, the allocator of PyTorch has no page to touch anew

_free: list[mmap] = []  # the longest unused first


def uncleared(shape: Sequence[int]) -> Tensor:
    """An fp32 tensor of what was there, also under `use_deterministic_algorithms`, where `torch.empty` fills: the kernel writes all
    that is read, and to fill a tape would take a third of a forward's time."""
    size = 4 * prod(shape)
    if size < LARGE:
        return torch.empty(*shape)
    memory = _taken(size) or mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    view = (ctypes.c_char * size).from_buffer(memory)
    weakref.finalize(view, _give_back, memory).atexit = False  # when the tensor is gone, wherever autograd kept it
    return torch.frombuffer(view, dtype=torch.float32).resize_(shape)  # not a view, which could not be changed in place


def _taken(size: int) -> mmap | None:
    """The smallest that holds so many bytes, and not many more."""
    memory = min((m for m in _free if size <= len(m) <= 2 * size), key=len, default=None)
    if memory is not None:
        try:
            _free.remove(memory)
        except ValueError:  # another thread was faster
            return None
    return memory


def _give_back(memory: mmap) -> None:
    _free.append(memory)
    while sum(map(len, _free)) > KEPT:
        del _free[0]
