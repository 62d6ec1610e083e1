"""What the forward and the backward walk over the chunks of an MLP memory share: tokens in slots, and the plan."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from proteus_lm.ops._deep_activation import Pointwise
from proteus_lm.ops._deep_block import tape_size
from proteus_lm.ops._deep_chunk import opening
from proteus_lm.ops._deep_gates import Gates
from proteus_lm.ops._deep_layout import Layout, Span
from proteus_lm.ops.memory_activations import places
from proteus_lm.ops.rows import Rows

GROUP = 8  # chunks between two states that are saved where a group's tape is not
BLOCK = 1 << 17  # most numbers in a (V, b, w) tensor of a block of several chunks, so that it stays in a processor's cache


class Step(NamedTuple):
    """One chunk of the walk: its units, its open width, and whether some of that width is locked to some of its tokens."""

    span: Span
    width: int
    mixed: bool


class Block(NamedTuple):
    """Chunks that are worked on together: one that is mixed, or several of the same rows and width that are not.

    Args:
        units: of all its chunks, times heads.  rows: units of each chunk.  advanced: of the last, those that fill it.
        mixed: it goes by `_deep_mixed`, as every chunk of a gated memory does.  whole: its width is open to all of its tokens.
    """

    units: slice
    rows: int
    advanced: int
    width: int
    mixed: bool
    whole: bool

    @property
    def ended(self) -> int:
        """Its units, from the first, that fill their chunk."""
        return self.units.stop - self.units.start - self.rows + self.advanced


class Walk:
    """Tokens in their slots, gates, and the plan. Arguments as for `_deep_scan.titans_scan`.

    Args:
        keep: keep of the gates what their backward needs.  made: that, where it need not be worked out again.
        norm: gain and bias (H, Dv) of a residual memory; or nothing.

    Raises:
        ValueError: for boundaries that do not fit the tokens.
    """

    def __init__(
        self,
        tokens: Sequence[Tensor],
        open_rows: Sequence[Tensor],
        weights: Sequence[Tensor],
        active: Tensor,
        open_active: Tensor | None,
        offset: Tensor,
        cu_seqlens: Tensor | None,
        chunk: int,
        read: str,
        act: Pointwise,
        clip: float | None,
        *,
        keep: bool,
        made: Sequence[Tensor] = (),
        norm: Sequence[Tensor] = (),
    ) -> None:
        q, rows = tokens[0], weights[0].shape[0]
        self.heads, self.dtype, self.act, self.clip = q.shape[2], weights[0].dtype, act, clip
        self._norm = [t.repeat(rows, 1)[:, None] for t in norm]
        self._to_norm = [torch.zeros_like(t) for t in self._norm]
        self.places, self.dim, self._weights = places(len(weights), act.arity), weights[-1].shape[-2], weights
        lengths, firsts = [q.shape[1]] * rows, [row * q.shape[1] for row in range(rows)]
        if cu_seqlens is not None:
            lengths, firsts = Rows(cu_seqlens, q.shape[1]).lengths.tolist(), cu_seqlens[:-1].tolist()
        phases = [position % chunk for position in offset.expand(rows).tolist()]
        held = None if open_active is None else open_active > 0
        self.layout = Layout(phases, firsts, lengths, chunk, held=held, device=q.device)
        earlier = [torch.zeros_like(open_rows[0]), *open_rows] if open_rows else [None] * len(tokens)
        slots = [self.layout.gather(t, e, self.dtype) for t, e in zip(tokens, earlier)]
        self.q, self.k, self.v = slots[:3]
        theta, alpha, eta = slots[3:]
        valid = self.layout.valid.repeat_interleave(self.heads, 0)
        self.gates = Gates(theta, alpha, eta, valid, read=read, keep=keep, made=made)
        everywhere = active.to(q.device).expand(q.shape[:2])[..., None]
        self._active = self.layout.gather(everywhere, None if open_active is None else open_active[..., None], torch.int64)
        self.steps = self._plan()

    def norm(self, block: Block) -> list[Tensor]:
        """Gain and bias of a residual memory for a block's rows, (rows, 1, Dv); or nothing."""
        return [t[: block.rows] for t in self._norm]

    def collect_norm(self, block: Block, grads: Sequence[Tensor]) -> None:
        """Take in the gradients to what `norm` gave."""
        for total, grad in zip(self._to_norm, grads):
            total[: block.rows].add_(grad)

    def norm_gradients(self) -> list[Tensor]:
        """With respect to gain and bias, (H, Dv)."""
        return [t[:, 0].unflatten(0, (-1, self.heads)).sum(0) for t in self._to_norm]

    @property
    def loss(self) -> dict[str, bool]:
        """Whether gradients are clipped, and whether the memory is residual."""
        return {"clip": self.clip is not None, "norm": bool(self._norm)}

    def opening(self, block: Block) -> tuple[Tensor, Tensor | None]:
        """For a mixed chunk's units, `_deep_chunk.opening`; of a whole one, one coordinate for all and no mask."""
        if block.whole:
            return torch.zeros(block.units.stop - block.units.start, 1, dtype=torch.int64, device=self.q.device), None
        both = opening(self._active[block.units.start // self.heads : block.units.stop // self.heads], block.width)
        return both[0].repeat_interleave(self.heads, 0), both[1].repeat_interleave(self.heads, 0)

    def _plan(self) -> list[Step]:
        """Open widths, by one transfer to the host."""
        least = self._active.where(self._active > 0, self.dim).amin(1)
        lows, highs = torch.stack([least, self._active.amax(1)]).tolist()
        spans = self.layout.spans
        widths = [(min(lows[s.start : s.stop]), max(highs[s.start : s.stop])) for s in spans]
        return [Step(span, high, low != high) for span, (low, high) in zip(spans, widths)]

    def groups(self) -> list[list[Block]]:
        """The chunks in groups of 8, each in blocks."""
        groups = []
        for first in range(0, len(self.steps), GROUP):
            blocks: list[Block] = []
            for step in self.steps[first : first + GROUP]:
                start, stop, full = step.span.start * self.heads, step.span.stop * self.heads, step.span.full * self.heads
                general = step.mixed or self.act.arity > 1
                block = Block(slice(start, stop), stop - start, full, step.width, general, not step.mixed)
                if blocks and self._joined(blocks[-1], block):
                    block = block._replace(units=slice(blocks.pop().units.start, stop))
                blocks.append(block)
            groups.append(blocks)
        return groups

    def _joined(self, before: Block, block: Block) -> bool:
        """Whether a chunk may go together with those before it."""
        alike = before.rows == before.advanced == block.rows and before.width == block.width
        numbers = (block.units.stop - before.units.start) * self.layout.slots * max(block.width, *self.q.shape[1:])
        return alike and not (before.mixed or block.mixed) and numbers <= BLOCK

    def shapes(self, width: int) -> list[tuple[int, int]]:
        """(n, w) of each layer's pair at an open width."""
        sides = [w.shape[-1] if p == "last" else w.shape[-2] for p, w in zip(self.places, self._weights)]
        return [(width if p == "inner" else n, width) for p, n in zip(self.places, sides)]

    def tape_bytes(self, blocks: Sequence[Block]) -> int:
        """Bytes of a group's tape."""
        size = 0
        for block in blocks:
            units, shapes = block.units.stop - block.units.start, self.shapes(block.width)
            if block.mixed:
                size += 2 * units * sum(map(prod, shapes))
            else:
                size += tape_size(units, self.layout.slots, shapes, **self.loss)
        return size * self.q.element_size()

    def pairs(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Weights, then momentum, (N, H, in, out), as new pairs (N * H, 2, n, w) in the order of the layout."""
        order, depth = torch.tensor(self.layout.order, device=self.q.device), len(self.places)
        ordered = [t.index_select(0, order).flatten(0, 1) for t in states]
        return [torch.stack([turned(t, p) for t in pair], 1) for p, *pair in zip(self.places, ordered[:depth], ordered[depth:])]

    def states(self, pairs: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of `pairs`."""
        back = torch.tensor(self.layout.order, device=self.q.device).argsort()
        rows = [turned(pair[:, half], p).unflatten(0, (-1, self.heads)) for half in (0, 1) for p, pair in zip(self.places, pairs)]
        return [t.index_select(0, back).contiguous() for t in rows]


class Target:
    """What the weights of all rows decay to, and the gradients to it; nothing where that is zero.

    Args:
        initial: (H, in, out) of each layer, the same for every row.
    """

    def __init__(self, walk: Walk, initial: Sequence[Tensor]) -> None:
        self._walk, rows = walk, len(walk.layout.order)
        turn = [turned(t, p)[:, None].repeat(rows, 1, 1, 1) for t, p in zip(initial, walk.places)]
        self._values, self._grads = Working(walk, turn), Working(walk, [])
        self._any = bool(initial)

    def begin_backward(self) -> None:
        """Make room for the gradients to collect."""
        self._grads = Working(self._walk, [torch.zeros_like(t) for t in self._values.whole()])

    def take(self, block: Block) -> list[Tensor]:
        """(rows of the block, n, w) of each layer at the block's open width; or nothing."""
        return [t[:, 0] for t in self._values.take(block)] if self._any else []

    def collect(self, block: Block, grads: Sequence[Tensor]) -> None:
        """Take in the gradients to what `take` gave."""
        if self._any:
            self._grads.put([a + b[:, None] for a, b in zip(self._grads.take(block), grads)])

    def gradients(self) -> list[Tensor]:
        """With respect to `initial`."""
        return [
            turned(t[:, 0], p).unflatten(0, (-1, self._walk.heads)).sum(0).contiguous()
            for t, p in zip(self._grads.whole(), self._walk.places)
        ]


class Working:
    """Pairs (N * H, 2, n, w) of all rows, of which a walk changes the rows and the open width of one block at a time.

    While blocks work on the same part it is a tensor of its own: a product into a strided view would run matrix by matrix.
    """

    def __init__(self, walk: Walk, pairs: Sequence[Tensor]) -> None:
        self._places, self._pairs = walk.places, list(pairs)
        self._at = (0, 0)
        self._part: list[Tensor] = []

    def take(self, block: Block) -> list[Tensor]:
        """What a block works on, not to be changed in place."""
        at = block.rows, block.width
        if at[0] == self._at[0] and at != self._at and "inner" not in self._places:
            self._resize(*at)
        elif at != self._at:
            whole = self.whole()
            self._at = at
            parts = zip(self._views(), whole)
            self._part = [p if v.shape == p.shape else v.clone(memory_format=torch.contiguous_format) for v, p in parts]
        return self._part

    def _resize(self, rows: int, width: int) -> None:
        """Take up or hand back the units between the old width and the new one, and leave the others where they are."""
        before, self._at = self._at[1], (rows, width)
        if width > before:
            self._part = [torch.cat([p, w[:rows, ..., before:width]], -1) for p, w in zip(self._part, self._pairs)]
            return
        for part, whole in zip(self._part, self._pairs):
            whole[:rows, ..., width:before] = part[..., width:]
        self._part = [p[..., :width].contiguous() for p in self._part]

    def put(self, part: Sequence[Tensor]) -> None:
        """The new values of what was taken."""
        self._part = list(part)

    def whole(self) -> list[Tensor]:
        """The pairs, with all changes."""
        for layer, (view, part) in enumerate(zip(self._views(), self._part)):
            if view.shape == self._pairs[layer].shape:
                self._pairs[layer] = part
            else:
                view.copy_(part)
        return self._pairs

    def _views(self) -> list[Tensor]:
        rows, width = self._at
        cuts = [pair[:rows, ..., :width] for pair in self._pairs]
        return [cut[:, :, :width] if place == "inner" else cut for place, cut in zip(self._places, cuts)]


def turned(state: Tensor, place: str) -> Tensor:
    """(.., in, out) with hidden units last, and back."""
    return state.mT if place == "last" else state
