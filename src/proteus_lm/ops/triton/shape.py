"""Sizes and flags that the kernels of the linear memories are compiled for."""

from __future__ import annotations

import os
from typing import NamedTuple

import triton
from torch import Tensor, float16, float32
from torch import dtype as Type

from proteus_lm.ops.triton.plan import TILE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# rule -> (writes an error, error against the decayed state)
RULES = {
    "retention": (False, False),
    "swla": (False, False),
    "delta_rule": (True, False),
    "gated_delta_rule": (True, True),
    "comba": (True, False),
}


class Shape(NamedTuple):
    """Of one call."""

    rule: str
    rows: int
    length: int
    heads: int
    keys: int
    values: int
    documents: int
    chunk: int
    key_tile: int
    key_tiles: int
    value_tile: int
    key_gate: bool
    value_gate: bool
    align: int
    tiles: int
    half: bool
    with_p: bool

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return self.rows * self.length

    @property
    def delta(self) -> bool:
        """Whether the rule writes an error."""
        return RULES[self.rule][0]

    @property
    def window(self) -> bool:
        """Whether a token writes its predecessor's pair again."""
        return self.rule == "swla"


def shape_of(
    rule: str, q: Tensor, v: Tensor, p: Tensor | None, cu_seqlens: Tensor | None, axis: str, blocks: int, save: bool
) -> Shape:
    """The shape of a call on q (B, T, H, K), v (B, T, H, V); save: with what a backward needs."""
    rows, length, heads, keys = q.shape
    values, gated = v.shape[-1], blocks > 1
    key_gate, value_gate = gated and axis == "key", gated and axis == "value"
    wide = max(16, triton.next_power_of_2(keys))
    tiles = min(2, wide // 16) if key_gate else 1
    dim = keys if axis == "key" else values
    # Open lengths are multiples of dim // blocks, or dim: what the compiler may assume of them to load 16 bytes at a time.
    width = dim // blocks if gated else dim
    align = next(a for a in (16, 8, 4, 2, 1) if width % a == 0 and dim % a == 0)
    half = q.dtype != float32
    # With K > 128 chunks of 32 walk faster (two of them in flight), but twice as many states cost the backward more than that.
    small = wide > 128 and not save if half else wide > 64
    return Shape(
        *(rule, rows, length, heads, keys, values),
        documents=rows if cu_seqlens is None else len(cu_seqlens) - 1,
        chunk=32 if small else 64,
        key_tile=wide // tiles,
        key_tiles=tiles,
        value_tile=min(128 if half and wide > 128 else 64, max(16, triton.next_power_of_2(values))),
        key_gate=key_gate,
        value_gate=value_gate,
        align=align,
        tiles=-(-dim // TILE) if gated else 1,
        half=half,
        with_p=p is not None,
    )


def floor(dtype: Type) -> float:
    """The least strength that the kernels take; its gradient is found by dividing by it."""
    return 2.0**-12 if dtype == float16 else 1e-15
