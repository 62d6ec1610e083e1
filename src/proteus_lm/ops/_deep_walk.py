"""What the forward and the backward walk over the chunks of an MLP memory share: tokens in slots, and the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proteus_lm.ops._deep_activation import Pointwise
from proteus_lm.ops._deep_chunk import Scales, Written, advance, cut, entries, opening, places, write
from proteus_lm.ops._deep_gates import Gates
from proteus_lm.ops._deep_layout import Layout, Span
from proteus_lm.ops.rows import Rows


class Step(NamedTuple):
    """One chunk of the walk: its units, its open width, and whether some of that width is locked to some of its tokens."""

    span: Span
    width: int
    mixed: bool


class Start(NamedTuple):
    """What a chunk is worked out from.

    Args:
        state: weights, then momentum, (U, in, out) at the open width; in a mixed chunk a copy in which entries that stay locked are
            blank, lest they hold NaN.
        scales, written: see `_deep_chunk`.
        opens: int64 (U, w), slot at which each coordinate opens; None where all are open throughout.
    """

    state: list[Tensor]
    scales: Scales
    written: Written
    opens: Tensor | None


class Walk:
    """Tokens in their slots, gates, and the plan. Arguments as for `_deep_scan.titans_scan`.

    Args:
        keep: prepare the gates for their backward.

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
        *,
        keep: bool,
    ) -> None:
        q, rows = tokens[0], weights[0].shape[0]
        self.heads, self.dtype, self.act = q.shape[2], weights[0].dtype, act
        self.places, self.dim, self._weights = places(len(weights)), weights[-1].shape[-2], weights
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
        self.gates = Gates(theta, alpha, eta, valid, read=read, keep=keep)
        everywhere = active.to(q.device).expand(q.shape[:2])[..., None]
        self._active = self.layout.gather(everywhere, None if open_active is None else open_active[..., None], torch.int64)
        self.steps = self._plan()

    def _plan(self) -> list[Step]:
        """Open widths, by one transfer to the host."""
        least = self._active.where(self._active > 0, self.dim).amin(1)
        lows, highs = torch.stack([least, self._active.amax(1)]).tolist()
        spans = self.layout.spans
        widths = [(min(lows[s.start : s.stop]), max(highs[s.start : s.stop])) for s in spans]
        return [Step(span, high, low != high) for span, (low, high) in zip(spans, widths)]

    def shape_at(self, width: int) -> list[tuple[int, int]]:
        """(in, out) of each layer at an open width."""
        shapes = [(w.shape[-2], w.shape[-1]) for w in self._weights]
        return [(i if p == "first" else width, o if p == "last" else width) for p, (i, o) in zip(self.places, shapes)]

    def units(self, step: Step) -> slice:
        """The units (times heads) of a chunk."""
        return slice(step.span.start * self.heads, step.span.stop * self.heads)

    def to_walk(self, states: Sequence[Tensor]) -> list[Tensor]:
        """States (N, H, in, out) as new tensors (N * H, in, out) in the order of the layout."""
        order = torch.tensor(self.layout.order, device=self.q.device)
        return [t.index_select(0, order).flatten(0, 1) for t in states]

    def from_walk(self, states: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of `to_walk`."""
        back = torch.tensor(self.layout.order, device=self.q.device).argsort()
        return [t.unflatten(0, (-1, self.heads)).index_select(0, back) for t in states]

    def start(self, step: Step, state: list[Tensor]) -> Start:
        """Scales and write side of a chunk, from the state at its start."""
        units, opens, mask = self.units(step), None, None
        if step.mixed:
            both = opening(self._active[step.span.start : step.span.stop], step.width)
            opens, mask = (t.repeat_interleave(self.heads, 0) for t in both)
            state = self._choose(opens, state, [t.new_zeros(()) for t in state])
        written = write(self.k[units], self.v[units], state[: len(self.places)], self.act, mask)
        return Start(state, self.gates.scales(units, opens, mask), written, opens)

    def end(self, step: Step, start: Start, state: list[Tensor]) -> None:
        """Bring `state`, of the rows and width of a chunk, from the chunk's start to its end, in place.

        Rows that do not fill the chunk, and locked entries, are left as they are.
        """
        rows, depth = step.span.full * self.heads, len(self.places)
        if not rows:
            return
        state, written = [t[:rows] for t in state], Written._make([t[:rows] for t in part] for part in start.written)
        scales = Scales._make(None if t is None else t[:rows] for t in start.scales)
        if start.opens is None:
            advance(state[:depth], state[depth:], written, scales)
            return
        new = [t[:rows].clone() for t in start.state]
        advance(new[:depth], new[depth:], written, scales)
        for old, chosen in zip(state, self._choose(start.opens[:rows], new, state)):
            old.copy_(chosen)

    def part(self, step: Step, states: Sequence[Tensor]) -> list[Tensor]:
        """The rows and the width of a chunk, as views of states (N * H, in, out) of all rows."""
        units = self.units(step)
        return [cut(t[: units.stop - units.start], p, step.width) for t, p in zip(states, [*self.places, *self.places])]

    def _choose(self, opens: Tensor, opened: Sequence[Tensor], locked: Sequence[Tensor]) -> list[Tensor]:
        """`opened` at the entries that open in this chunk or before (all their coordinates do), `locked` at the others."""
        inside, layers = opens < self.layout.slots, [*self.places, *self.places]
        return [torch.where(entries(inside, place), a, b) for place, a, b in zip(layers, opened, locked)]


class Working:
    """States (N * H, in, out) of all rows, of which a walk changes the rows and the open width of one chunk at a time, in place.

    While chunks work on the same part it is a contiguous copy: a product into a strided view would run matrix by matrix.
    """

    def __init__(self, walk: Walk, states: Sequence[Tensor]) -> None:
        self._walk, self._states = walk, list(states)
        self._views: list[Tensor] = []
        self._part: list[Tensor] = []

    def part(self, step: Step) -> list[Tensor]:
        """What a chunk works on. Valid until another part is asked for."""
        views = self._walk.part(step, self._states)
        if not self._views or views[0].shape != self._views[0].shape:
            self.whole()
            self._views, self._part = views, [v.contiguous() for v in views]
        return self._part

    def whole(self) -> list[Tensor]:
        """The states, with all changes."""
        for view, part in zip(self._views, self._part):
            if part is not view:
                view.copy_(part)
        return self._states
