"""A mixed chunk, some of whose open width is locked to some of its tokens, as a block of the walk: `_deep_chunk` between pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proteus_lm.ops import _deep_chunk
from proteus_lm.ops._deep_chunk import Gradients, Scales, Written, advance, entries, write
from proteus_lm.ops._deep_walk import Block, Walk, turned


class Start(NamedTuple):
    """What a chunk is worked out from.

    Args:
        state: weights, then momentum, (U, in, out) at the open width; a copy in which entries that stay locked are blank, lest they
            hold NaN.
        scales, written: see `_deep_chunk`.
        opens: int64 (U, w), slot at which each coordinate opens.
        target: (U, in, out) of each layer, what the weights decay to, blank likewise; or nothing.
    """

    state: list[Tensor]
    scales: Scales
    written: Written
    opens: Tensor
    target: list[Tensor]


def forward(
    walk: Walk, block: Block, pairs: Sequence[Tensor], target: Sequence[Tensor] = (), norm: Sequence[Tensor] = ()
) -> tuple[Tensor, list[Tensor]]:
    """y (U, b, Dv), and the pairs at the chunk's end.

    Args:
        target: (U, n, w) of each layer, what the weights decay to; or nothing.
        norm: gain and bias (U, 1, Dv) of a residual memory; or nothing.
    """
    state, depth = _apart(walk, pairs), len(pairs)
    start = _start(walk, block, state, target, norm)
    weights, momentum = start.state[:depth], start.state[depth:]
    y, _ = _deep_chunk.read(
        walk.q[block.units], weights, momentum, start.written, start.scales, walk.act, keep=False, target=start.target
    )
    _end(walk, block, start, state)
    return y, _together(walk, state)


def backward(
    walk: Walk,
    block: Block,
    pairs: Sequence[Tensor],
    grad: Tensor,
    to_pairs: Sequence[Tensor],
    target: Sequence[Tensor] = (),
    norm: Sequence[Tensor] = (),
) -> tuple[Gradients, list[Tensor], list[Tensor]]:
    """Adjoint of `forward` at the pairs of the chunk's start: gradients to the tokens, to those pairs and to the target. The gates
    get theirs."""
    depth, full = len(pairs), block.advanced
    start, to_state = _start(walk, block, _apart(walk, pairs), target, norm), _apart(walk, to_pairs)
    weights, momentum, scales = start.state[:depth], start.state[depth:], start.scales
    if 0 < full < block.rows:
        scales = _held(scales, full)
    _, reading = _deep_chunk.read(
        walk.q[block.units], weights, momentum, start.written, scales, walk.act, keep=True, target=start.target
    )
    out = _deep_chunk.backward(
        *(grad, to_state[:depth], to_state[depth:], weights, momentum, start.written, reading, scales, walk.act),
        advanced=full > 0,
        target=start.target,
        norm=norm,
    )
    for total in out.scales[3:8]:
        total[full:] = 0
    walk.gates.collect(out.scales, block.units, start.opens)
    return out, _together(walk, to_state), [turned(t, place) for t, place in zip(out.target, walk.places)]


def _start(walk: Walk, block: Block, state: list[Tensor], target: Sequence[Tensor], norm: Sequence[Tensor]) -> Start:
    """Scales and write side, from the state at the chunk's start."""
    units = block.units
    opens, mask = walk.opening(block)
    aims = [turned(t, place) for t, place in zip(target, walk.places)]
    state, aims = (_choose(walk, opens, part, [t.new_zeros(()) for t in part]) for part in (state, aims))
    written = write(walk.k[units], walk.v[units], state[: len(walk.places)], walk.act, mask, walk.clip, norm)
    return Start(state, walk.gates.scales(units, opens, mask), written, opens, aims)


def _end(walk: Walk, block: Block, start: Start, state: list[Tensor]) -> None:
    """Bring `state` from the chunk's start to its end, in place.

    Rows that do not fill the chunk, and locked entries, are left as they are.
    """
    rows, depth = block.advanced, len(walk.places)
    if not rows:
        return
    state, written = [t[:rows] for t in state], Written._make([t[:rows] for t in part] for part in start.written)
    scales = Scales._make(None if t is None else t[:rows] for t in start.scales)
    new = [t[:rows].clone() for t in start.state]
    advance(new[:depth], new[depth:], written, scales, [t[:rows] for t in start.target])
    for old, chosen in zip(state, _choose(walk, start.opens[:rows], new, state)):
        old.copy_(chosen)


def _choose(walk: Walk, opens: Tensor, opened: Sequence[Tensor], locked: Sequence[Tensor]) -> list[Tensor]:
    """`opened` at the entries that open in this chunk or before (all their coordinates do), `locked` at the others."""
    inside, layers = opens < walk.layout.slots, [*walk.places, *walk.places]
    return [torch.where(entries(inside, place), a, b) for place, a, b in zip(layers, opened, locked)]


def _held(scales: Scales, full: int) -> Scales:
    """The same scales, with rows from `full` on leaving the chunk as they entered it."""
    ends = [t.clone() for t in scales[3:8]]
    for end, still in zip(ends, (1, 0, 1, 0, 0)):
        end[full:] = still
    return Scales._make([*scales[:3], *ends, scales.mask])


def _apart(walk: Walk, pairs: Sequence[Tensor]) -> list[Tensor]:
    """Pairs as new weights, then momentum, (U, in, out)."""
    views = [turned(pair[:, half], place) for half in (0, 1) for place, pair in zip(walk.places, pairs)]
    return [view.clone(memory_format=torch.contiguous_format) for view in views]


def _together(walk: Walk, state: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `_apart`."""
    halves = zip(walk.places, state[: len(walk.places)], state[len(walk.places) :])
    return [torch.stack([turned(t, place) for t in half], 1) for place, *half in halves]
