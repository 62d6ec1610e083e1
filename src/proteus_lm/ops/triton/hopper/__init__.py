"""Kernels of the linear memories for Hopper GPUs (compute capability 9.0), in Gluon: warps of their own load, multiply and store.

They stand in for `scan`, `reverse` and `gradients` of the Triton kernels, same arguments and results, where `fits` says so.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from proteus_lm.ops.triton.shape import INTERPRETED, RULES, Shape, floor

VARIABLE = "PROTEUS_HOPPER"
TESTED = "3.6."  # Gluon promises no stable interface: versions of Triton with which these kernels were compared with fp64 on a GPU


def refuse(device: torch.device | None = None) -> str | None:
    """Why these kernels do not run on a GPU (default: the current one), or None.

    Raises:
        ValueError: for a value of PROTEUS_HOPPER other than "auto" and "off".
    """
    chosen = os.environ.get(VARIABLE, "auto")
    if chosen not in ("auto", "off"):
        raise ValueError(f"{VARIABLE} is {chosen!r}; it must be 'auto' or 'off'")
    if chosen == "off":
        return f"{VARIABLE} is 'off'"
    if INTERPRETED:
        return "Triton's interpreter runs"
    if not triton.__version__.startswith(TESTED):
        return f"Triton is {triton.__version__}; these kernels were tested with {TESTED}x"
    # AMD's GPUs give numbers of their own for the capability, 9 among them.
    if torch.version.hip is not None or not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] != 9:
        return "no GPU of NVIDIA's of compute capability 9.x"
    return None


_refuse = cache(refuse)  # a device does not change while a process runs


def fits(s: Shape, device: torch.device, *tensors: Tensor | None) -> bool:
    """Whether these kernels take a call with these operands: 16 bits, chunks of 64, K of 64 or 128, V a multiple of 64,
    open lengths multiples of 8, addresses of 16 bytes.

    Besides, `scan` and `reverse` take no sliding window, and `gradients` V up to 128.
    """
    return (
        s.half
        and s.chunk == 64
        and s.keys in (64, 128)
        and s.values % 64 == 0
        and s.align % 8 == 0
        and _refuse(device) is None
        and all(x is None or x.data_ptr() % 16 == 0 for x in tensors)
    )


def _walk(s: Shape) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and constants of a walk."""
    return (s.documents * s.heads * (s.values // 64),), {
        "H": s.heads,
        "K": s.keys,
        "V": s.values,
        "TILES": s.tiles,
        "DELTA": s.delta,
        "HAS_P": s.with_p,
        "KEY": s.key_gate,
        "VALUE": s.value_gate,
        "ALIGN": s.align,
        "num_warps": 4,
        "maxnreg": 168,  # of all warps on average; the multiplying ones get what the others leave
    }


@cache
def _kernels() -> tuple[Any, Any, Any]:
    """scan, reverse and gradients; Gluon is imported where it runs."""
    from proteus_lm.ops.triton.hopper import _gradients, _walks

    return _walks.scan, _walks.reverse, _gradients.gradients


def scan(s: Shape, *arguments: Any, has_initial: bool, has_final: bool, save: bool) -> None:
    """Launch `scan`, with the arguments of the Triton kernel less scale."""
    grid, constants = _walk(s)
    _kernels()[0][grid](*arguments, HAS_INITIAL=has_initial, HAS_FINAL=has_final, SAVE=save, **constants)


def reverse(s: Shape, *arguments: Any, has_initial: bool, has_final: bool) -> None:
    """Launch `reverse`, with the arguments of the Triton kernel less scale."""
    grid, constants = _walk(s)
    _kernels()[1][grid](*arguments, HAS_INITIAL=has_initial, HAS_FINAL=has_final, **constants)


def gradients(s: Shape, chunks: int, *arguments: Any, has_g: bool) -> None:
    """Launch `gradients`, with the arguments of the Triton kernel less span; dg and dgamma have one part, the sum."""
    items, device = chunks * s.heads, arguments[0].device
    programs = min(items, torch.cuda.get_device_properties(device).multi_processor_count)
    _kernels()[2][(programs,)](
        *(*arguments, items),
        H=s.heads,
        K=s.keys,
        V=s.values,
        DELTA=s.delta,
        HAS_G=has_g,
        HAS_P=s.with_p,
        DECAYED=RULES[s.rule][1],
        WINDOW=s.window,
        FLOOR=floor(arguments[0].dtype),
        KEY=s.key_gate,
        VALUE=s.value_gate,
        ALIGN=s.align,
        REGISTERS=72 if s.keys == 64 else 48,
        num_warps=s.keys // 16,
        maxnreg=168 if s.keys == 64 else 128,
    )
