"""The walk over the chunks of an MLP memory, forward and backward, as two custom operations that torch.compile does not look into.

What changes with the position (phases on the chunk grid, open widths, which rows end where) is worked out inside, so that nothing
is compiled again when only the position changes. Lists of tensors stand for structures, since an operation's schema has no others:
`tokens` = q, k, v, theta, alpha, eta; `open_rows` = k, v, theta, alpha, eta of the open chunk, or nothing.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from proteus_lm.ops import _deep_chunk
from proteus_lm.ops._deep_activation import POINTWISE
from proteus_lm.ops._deep_chunk import Scales
from proteus_lm.ops._deep_walk import Start, Step, Walk, Working

GROUP = 8  # chunks between two saved states; the backward holds the states and write sides of so many at once


@torch.library.custom_op("proteus_lm::titans_scan", mutates_args=())
def titans_scan(
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
    """Read and write an MLP memory along rows of tokens.

    Args:
        tokens: q, k (B, T, H, D), v (B, T, H, Dv), theta, alpha, eta (B, T, H).
        open_rows: k, v (N, chunk, H, .), theta, alpha, eta (N, chunk, H), tokens of earlier calls since the boundary; or nothing.
        weights, momentum: the state at the last boundary, (N, H, in, out) each, in the type to compute in.
        active: int64 (B or 1, T), open coordinates at each token.  open_active: int64 (N, chunk), at each open row.
        offset: int64 (N or 1), position of each row's first token.  position: int64 (N), what it must be, where known.
        cu_seqlens: int (N + 1), where B = 1 row holds N documents.
        save: keep every 8th state for the backward.
        static: give those their largest shape, as compilation wants, rather than that of the open width.

    Returns:
        y (B, T, H, Dv) in the type of v; weights and momentum (N, H, in, out) at each row's last boundary; with `save`, one flat
        tensor of saved states for each of these.

    Raises:
        ValueError: for boundaries that do not fit the tokens, or an offset that is not the position.
    """
    check_position(offset, position)
    with torch.autocast(tokens[0].device.type, enabled=False):
        act = POINTWISE[memory_activation]
        walk = Walk(tokens, open_rows, weights, active, open_active, offset, cu_seqlens, chunk, read, act, keep=False)
        depth, y = len(weights), torch.empty_like(walk.v)
        states = Working(walk, walk.to_walk([*weights, *momentum]))
        saved: list[Tensor] = []
        if save:
            most = _most_saved(tokens[0], weights, chunk)
            exact = [sum(map(prod, layer)) for layer in zip(*_saved_shapes(walk).values())] or [0] * (2 * depth)
            saved = [y.new_empty(most * t[0].numel() if static else n) for t, n in zip([*weights, *momentum], exact)]
        slices = _saved_parts(walk, saved)
        for number, step in enumerate(walk.steps):
            units, state = walk.units(step), states.part(step)
            for target, source in zip(slices.get(number, []), state):
                target.copy_(source)
            start = walk.start(step, state)
            y[units], _ = _deep_chunk.read(
                walk.q[units], start.state[:depth], start.state[depth:], start.written, start.scales, act, keep=False
            )
            walk.end(step, start, state)
        return [walk.layout.scatter(y, tokens[2])[0], *walk.from_walk(states.whole()), *saved]


@torch.library.custom_op("proteus_lm::titans_scan_backward", mutates_args=())
def titans_scan_backward(
    grads: list[Tensor],
    tokens: list[Tensor],
    open_rows: list[Tensor],
    weights: list[Tensor],
    momentum: list[Tensor],
    saved: list[Tensor],
    active: Tensor,
    open_active: Tensor | None,
    offset: Tensor,
    cu_seqlens: Tensor | None,
    chunk: int,
    read: str,
    memory_activation: str,
) -> list[Tensor]:
    """Gradients to `tokens`, `open_rows`, `weights` and `momentum`, in this order, from those to y and to the state at the end.

    Chunks are walked backwards in groups: from the state saved at a group's start its states and write sides are worked out again.
    """
    with torch.autocast(tokens[0].device.type, enabled=False):
        act = POINTWISE[memory_activation]
        walk = Walk(tokens, open_rows, weights, active, open_active, offset, cu_seqlens, chunk, read, act, keep=True)
        earlier = None if not open_rows else open_rows[1]
        grad_y = walk.layout.gather(grads[0], None if earlier is None else torch.zeros_like(earlier), walk.dtype)
        to_states = Working(walk, walk.to_walk(grads[1:]))
        to_rows = [torch.zeros_like(t) for t in (walk.q, walk.k, walk.v)]
        slices = _saved_parts(walk, saved)
        initial = walk.to_walk([*weights, *momentum])
        for first in reversed(range(0, len(walk.steps), GROUP)):
            steps = walk.steps[first : first + GROUP]
            for step, start in reversed(list(zip(steps, _group(walk, steps, initial, slices.get(first))))):
                _step_backward(walk, step, start, grad_y, to_states.part(step), to_rows)
        slots = [*to_rows, *walk.gates.backward()]
        spread = [walk.layout.scatter(s, t, e) for s, t, e in zip(slots, tokens, [None, *open_rows] if open_rows else [None] * 6)]
        return [*(s[0] for s in spread), *(s[1] for s in spread if s[1] is not None), *walk.from_walk(to_states.whole())]


def _group(walk: Walk, steps: list[Step], initial: list[Tensor], saved: list[Tensor] | None) -> list[Start]:
    """The starts of a group's chunks. What was locked at the group's start still holds its initial values."""
    starts, states = [], Working(walk, [t.clone() for t in initial])
    for target, source in zip(states.part(steps[0]), saved or []):
        target.copy_(source)
    for step in steps:
        state = [t.clone() for t in states.part(step)]
        starts.append(walk.start(step, state))
        if step is not steps[-1]:
            walk.end(step, starts[-1], states.part(step))
    return starts


def _step_backward(walk: Walk, step: Step, start: Start, grad_y: Tensor, to_state: list[Tensor], to_rows: list[Tensor]) -> None:
    units, depth = walk.units(step), len(walk.places)
    weights, momentum = start.state[:depth], start.state[depth:]
    full, scales = step.span.full * walk.heads, start.scales
    if 0 < full < units.stop - units.start:
        scales = _held(scales, full)
    _, reading = _deep_chunk.read(walk.q[units], weights, momentum, start.written, scales, walk.act, keep=True)
    out = _deep_chunk.backward(
        *(grad_y[units], to_state[:depth], to_state[depth:], weights, momentum, start.written, reading, scales, walk.act),
        advanced=full > 0,
    )
    for target, rows in zip(to_rows, (out.q, out.k, out.v)):
        target[units, :, : rows.shape[-1]] = rows
    for total in out.scales[3:8]:
        total[full:] = 0
    walk.gates.collect(out.scales, units, start.opens)


def _held(scales: Scales, full: int) -> Scales:
    """The same scales, with rows from `full` on leaving the chunk as they entered it."""
    ends = [t.clone() for t in scales[3:8]]
    for end, still in zip(ends, (1, 0, 1, 0, 0)):
        end[full:] = still
    return Scales._make([*scales[:3], *ends, scales.mask])


def _most_saved(q: Tensor, weights: list[Tensor], chunk: int) -> int:
    """A bound on how many rows' states are saved, whatever the positions and documents."""
    return (q.shape[0] * q.shape[1] + weights[0].shape[0] * (chunk - 1)) // (chunk * GROUP)


def _saved_shapes(walk: Walk) -> dict[int, list[tuple[int, int, int]]]:
    """The states to save, by the number of the chunk they are the start of: shape of each layer's weights, then momentum."""
    shapes = {}
    for number in range(GROUP, len(walk.steps), GROUP):
        span, width, _ = walk.steps[number]
        rows = (span.stop - span.start) * walk.heads
        shapes[number] = [(rows, *shape) for shape in walk.shape_at(width)] * 2
    return shapes


def _saved_parts(walk: Walk, saved: list[Tensor]) -> dict[int, list[Tensor]]:
    """The saved states as views into their flat tensors."""
    shapes = _saved_shapes(walk) if saved else {}
    used, parts = [0] * len(saved), {}
    for number, layers in shapes.items():
        parts[number] = [flat[u : u + prod(shape)].view(shape) for flat, u, shape in zip(saved, used, layers)]
        used = [u + prod(shape) for u, shape in zip(used, layers)]
    return parts


def check_position(offset: Tensor, position: Tensor | None) -> None:
    """Raise ValueError (on CUDA, assert on the device) where the offset (N or 1) is not the position (N), if one is given."""
    if position is None:
        return
    if position.device.type != "cpu" or offset.device.type != "cpu":
        same = (offset.to(position.device) == position).all()
        torch._assert_async(same, "the state's position is not the offset of the activation")
    elif not torch.equal(offset.expand_as(position), position):
        raise ValueError(
            f"the state stands at positions {position.tolist()} but the activation starts at {offset.tolist()}; "
            "give the activation the state's position as offset"
        )


@titans_scan.register_fake
def _(*inputs: Any) -> list[Tensor]:
    tokens, _, weights, momentum, *_, chunk, _, _, save, _ = inputs
    state = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (*weights, *momentum)]
    most = _most_saved(tokens[0], weights, chunk)
    saved = [t.new_empty(most * t[0].numel()) for t in (*weights, *momentum)] if save else []
    return [torch.empty_like(tokens[2], memory_format=torch.contiguous_format), *state, *saved]


@titans_scan_backward.register_fake
def _(*inputs: Any) -> list[Tensor]:
    _, tokens, open_rows, weights, momentum, *_ = inputs
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (*tokens, *open_rows, *weights, *momentum)]


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    tokens, open_rows, weights, momentum, active, open_active, offset, _, cu_seqlens, chunk, read, memory_activation, *_ = inputs
    lists = [tokens, open_rows, weights, momentum, output[1 + 2 * len(weights) :]]
    ctx.counts, ctx.options = [len(part) for part in lists], (chunk, read, memory_activation)
    ctx.save_for_backward(*(t for part in lists for t in part), active, open_active, offset, cu_seqlens)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple:
    flat = list(ctx.saved_tensors)
    tokens, open_rows, weights, momentum, saved = ([flat.pop(0) for _ in range(count)] for count in ctx.counts)
    shapes = [tokens[2], *weights, *momentum]
    given = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, shapes)]
    out = iter(titans_scan_backward(given, tokens, open_rows, weights, momentum, saved, *flat, *ctx.options))
    return (*([next(out) for _ in range(count)] for count in ctx.counts[:4]), *[None] * 10)


titans_scan.register_autograd(_gradients, setup_context=_setup)
