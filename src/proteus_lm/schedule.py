"""When a block of memory opens (Proteus eq 12-13). Pure integer arithmetic: no model in sight.

The memory is cut into E blocks; block e opens at position e * step, step = max(1, N // E), and all are open from position N on.
Positions count from 0; a negative position (a persistent token) stands before the context and sees one block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, overload

import torch
from torch import Tensor

if TYPE_CHECKING:
    from proteus_lm.activation import Activation


@dataclass(frozen=True)
class ActivationSchedule:
    """E blocks over a context of N positions (or optimiser steps).

    Args:
        blocks: E >= 1. One block is the base model: everything is open always.
        context: N >= 1, the training context in tokens. It does not follow the length of an evaluation.
        unlocks: the positions at which blocks 0 .. E-1 open, in place of the uniform rule; non-decreasing, the first one 0. A
            function of a block's number is called for each and kept as what it gave.

    Raises:
        ValueError: for values outside these rules.
    """

    blocks: int
    context: int
    unlocks: Sequence[int] | Callable[[int], int] | None = None

    def __post_init__(self) -> None:
        for name in ("blocks", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if self.unlocks is not None:
            object.__setattr__(self, "unlocks", self._checked(self.unlocks))

    def _checked(self, given: Sequence[int] | Callable[[int], int]) -> tuple[int, ...]:
        """The given unlock positions as numbers."""
        unlocks = tuple(given(block) for block in range(self.blocks)) if callable(given) else tuple(given)
        for block, position in enumerate(unlocks):
            if not isinstance(position, int) or isinstance(position, bool):
                raise ValueError(f"block {block} opens at {position!r}; unlock positions must be whole numbers")
        if len(unlocks) != self.blocks:
            raise ValueError(f"{len(unlocks)} unlock positions for {self.blocks} blocks; give one for each block")
        if unlocks[0] != 0:
            raise ValueError(f"the first block opens at {unlocks[0]}; it must open at position 0")
        if any(b < a for a, b in zip(unlocks, unlocks[1:])):
            raise ValueError(f"unlock positions {unlocks} fall; they must not decrease")
        return unlocks

    def stretched(self, length: int) -> ActivationSchedule:
        """The same blocks, opening evenly over `length` positions.

        Raises:
            ValueError: for a length below 1, or where the unlock positions were given: they stand where they stand.
        """
        if self.unlocks is not None:
            raise ValueError(
                f"blocks open at the positions {self.unlocks}, which were given: only the uniform rule can be stretched"
            )
        return ActivationSchedule(self.blocks, length)

    @property
    def step(self) -> int:
        """Positions between two unlocks of the uniform rule, max(1, N // E)."""
        return max(1, self.context // self.blocks)

    @property
    def _opens(self) -> tuple[int, ...]:
        given = cast("tuple[int, ...] | None", self.unlocks)  # numbers, since the constructor
        return given or tuple(min(e * self.step, self.context) for e in range(self.blocks))

    def unlock_position(self, block: int) -> int:
        """The first position at which `block` (0 .. E-1) is open.

        Raises:
            IndexError: when there is no such block.
        """
        if not 0 <= block < self.blocks:
            raise IndexError(f"block {block} of {self.blocks}; blocks count from 0")
        return self._opens[block]

    @overload
    def active_blocks(self, position: int) -> int: ...
    @overload
    def active_blocks(self, position: Tensor) -> Tensor: ...
    def active_blocks(self, position: int | Tensor) -> int | Tensor:
        """Open blocks at a 0-based position: an int, or an integer tensor of any shape (returned as int64, same shape)."""
        if isinstance(position, Tensor):
            if position.is_floating_point():
                raise TypeError(f"positions are {position.dtype}; they must be integers")
            if self.unlocks is None:
                count = 1 + position.clamp(min=0).div(self.step, rounding_mode="floor")
                return torch.where(position >= self.context, self.blocks, count.clamp(max=self.blocks)).long()
            opens = torch.tensor(self._opens, device=position.device)
            return torch.searchsorted(opens, position.clamp(min=0).long().contiguous(), right=True)
        return sum(opens <= max(position, 0) for opens in self._opens)

    @overload
    def active(self, dim: int, position: int) -> int: ...
    @overload
    def active(self, dim: int, position: Tensor) -> Tensor: ...
    def active(self, dim: int, position: int | Tensor) -> int | Tensor:
        """Open coordinates of a dimension: n * (dim // E) of n < E open blocks; all `dim` of E (the last takes the remainder).

        Raises:
            ValueError: when the dimension has fewer coordinates than there are blocks.
        """
        if dim < self.blocks:
            raise ValueError(f"a dimension of {dim} cannot be cut into {self.blocks} blocks; use at most {dim} blocks")
        count = self.active_blocks(position)
        if isinstance(count, Tensor):
            return torch.where(count == self.blocks, dim, count * (dim // self.blocks))
        return dim if count == self.blocks else count * (dim // self.blocks)

    def block_bounds(self, dim: int) -> list[tuple[int, int]]:
        """[start, end) of each block's coordinates in a dimension; the last takes the remainder."""
        width = dim // self.blocks
        ends = [(e + 1) * width for e in range(self.blocks - 1)] + [dim]
        return list(zip([0, *ends[:-1]], ends))

    def segments(self, dim: int, start: int, end: int) -> tuple[tuple[int, int, int], ...]:
        """Stretches of positions with one open length: (first, past the last, open coordinates), covering [start, end)."""
        edges = [start, *sorted({u for u in self._opens if start < u < end}), end]
        return tuple((a, b, self.active(dim, a)) for a, b in zip(edges, edges[1:]) if a < b)

    def activation(
        self,
        dim: int,
        length: int,
        *,
        offset: int | Sequence[int] | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> Activation:
        """The schedule applied to `dim` coordinates and `length` positions; see `Activation`."""
        from proteus_lm.activation import Activation

        return Activation(self, dim, length, offset=offset, cu_seqlens=cu_seqlens, device=device)
