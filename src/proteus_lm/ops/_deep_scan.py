"""The walk over the chunks of an MLP memory, forward and backward, as two custom operations that torch.compile does not look into.

What changes with the position (phases on the chunk grid, open widths, which rows end where) is worked out inside, so that nothing
is compiled again when only the position changes. Lists of tensors stand for structures, since an operation's schema has no others:
`tokens` = q, k, v, theta, alpha, eta; `open_rows` = k, v, theta, alpha, eta of the open chunk, or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from proteus_lm.ops import _deep_block, _deep_mixed
from proteus_lm.ops._deep_activation import POINTWISE
from proteus_lm.ops._deep_block import Tape
from proteus_lm.ops._deep_walk import GROUP, Block, Target, Walk, Working

KEPT = 1 << 28  # bytes of tape kept for the backward of one call; it works out again what lies behind them


@torch.library.custom_op("proteus_lm::titans_scan", mutates_args=())
def titans_scan(
    tokens: list[Tensor],
    open_rows: list[Tensor],
    weights: list[Tensor],
    momentum: list[Tensor],
    target: list[Tensor],
    norm: list[Tensor],
    active: Tensor,
    open_active: Tensor | None,
    offset: Tensor,
    position: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk: int,
    read: str,
    memory_activation: str,
    clip: float | None,
    save: bool,
    static: bool,
) -> list[Tensor]:
    """Read and write an MLP memory along rows of tokens.

    Args:
        tokens: q, k (B, T, H, D), v (B, T, H, Dv), theta, alpha, eta (B, T, H).
        open_rows: k, v (N, chunk, H, .), theta, alpha, eta (N, chunk, H), tokens of earlier calls since the boundary; or nothing.
        weights, momentum: the state at the last boundary, (N, H, in, out) each, in the type to compute in.
        target: (H, in, out) of each layer in that type, what the weights decay to; nothing: to zero.
        norm: gain and bias (H, Dv) of a residual memory in that type; v is then v - k, and y what the last matrix puts out.
        active: int64 (B or 1, T), open coordinates at each token.  open_active: int64 (N, chunk), at each open row.
        offset: int64 (N or 1), position of each row's first token.  position: int64 (N), what it must be, where known.
        cu_seqlens: int (N + 1), where B = 1 row holds N documents.
        clip: limit of a token's inner gradient, or None.
        save: keep for the backward the tapes of the first groups of chunks, up to `KEPT` bytes, and the others' start states.
        static: keep no tapes, and give the states' tensors their largest shape, as compilation wants, rather than that in use.

    Returns:
        y (B, T, H, Dv) in the type of v; weights and momentum (N, H, in, out) at each row's last boundary; with `save`, for each
        layer one flat tensor of saved states; then the tapes, if any, and what was made of the gates.

    Raises:
        ValueError: for boundaries that do not fit the tokens, or an offset that is not the position.
    """
    check_position(offset, position)
    with torch.autocast(tokens[0].device.type, enabled=False):
        act = POINTWISE[memory_activation]
        starts = active, open_active, offset, cu_seqlens
        walk = Walk(tokens, open_rows, weights, *starts, chunk, read, act, clip, keep=save, norm=norm)
        y, groups = torch.empty_like(walk.v), walk.groups()
        kept = _kept(walk, groups, KEPT if save and not static else 0)
        working, aim = Working(walk, walk.pairs([*weights, *momentum])), Target(walk, target)
        saved, tapes = _saved(walk, groups, kept, _most_saved(tokens[0], weights, chunk) if static else None, save), []
        slices = _saved_parts(walk, groups, kept, saved)
        for number, group in enumerate(groups):
            for room, state in zip(slices.get(number, []), working.take(group[0])):
                room.copy_(state)
            for block in group:
                tape = _forward(walk, block, working, aim, y[block.units], keep=number < kept)
                tapes += tape if number < kept else []
        return [
            walk.layout.scatter(y, tokens[2])[0],
            *walk.states(working.whole()),
            *saved,
            *tapes,
            *(walk.gates.made if kept else []),
        ]


@torch.library.custom_op("proteus_lm::titans_scan_backward", mutates_args=())
def titans_scan_backward(
    grads: list[Tensor],
    tokens: list[Tensor],
    open_rows: list[Tensor],
    weights: list[Tensor],
    momentum: list[Tensor],
    target: list[Tensor],
    norm: list[Tensor],
    saved: list[Tensor],
    active: Tensor,
    open_active: Tensor | None,
    offset: Tensor,
    cu_seqlens: Tensor | None,
    chunk: int,
    read: str,
    memory_activation: str,
    clip: float | None,
) -> list[Tensor]:
    """Gradients to tokens, open_rows, weights, momentum, target and norm, in this order, from those to y and the state at the end.

    Chunks are walked backwards in groups. A tape that was not kept is worked out again from the state saved at its group's start.
    """
    with torch.autocast(tokens[0].device.type, enabled=False):
        act, tapes = POINTWISE[memory_activation], list(saved[len(weights) :])
        tapes, made = tapes[:-2], tapes[-2:]
        starts = active, open_active, offset, cu_seqlens
        walk = Walk(tokens, open_rows, weights, *starts, chunk, read, act, clip, keep=True, made=made, norm=norm)
        walk.gates.begin_backward()
        aim = Target(walk, target)
        aim.begin_backward()
        earlier = None if not open_rows else open_rows[1]
        grad_y = walk.layout.gather(grads[0], None if earlier is None else torch.zeros_like(earlier), walk.dtype)
        working = Working(walk, walk.pairs(grads[1:]))
        blank = torch.zeros_like if len(weights) == 1 else torch.empty_like  # one layer takes in open coordinates only
        to_rows = [blank(t) for t in (walk.q, walk.k, walk.v)]
        groups = walk.groups()
        kept = _kept(walk, groups, KEPT if tapes else 0)
        initial, slices = walk.pairs([*weights, *momentum]), _saved_parts(walk, groups, kept, saved)
        for number, group in reversed(list(enumerate(groups))):
            again = [] if number < kept else _again(walk, group, initial, slices.get(number), aim)
            for block in reversed(group):
                tape = _take_tape(walk, block, tapes) if number < kept else again.pop()
                _backward(walk, block, tape, grad_y[block.units], working, aim, to_rows)
        slots = [*to_rows, *walk.gates.backward()]
        spread = [walk.layout.scatter(s, t, e) for s, t, e in zip(slots, tokens, [None, *open_rows] if open_rows else [None] * 6)]
        rest = [*walk.states(working.whole()), *aim.gradients(), *walk.norm_gradients()]
        return [*(s[0] for s in spread), *(s[1] for s in spread if s[1] is not None), *rest]


def _forward(walk: Walk, block: Block, working: Working, aim: Target, y: Tensor, *, keep: bool) -> list[Tensor]:
    """The tape of a block; fills in its y (V, b, Dv), and brings the working state to the block's end."""
    start, units, target, norm = working.take(block), block.units, aim.take(block), walk.norm(block)
    if block.mixed:
        answers, end = _deep_mixed.forward(walk, block, start, target, norm)
        y.copy_(answers)
        tape = start
    else:
        scales, options = walk.gates.block_scales(units, block.ended), {"clip": walk.clip, "target": target, "norm": norm}
        rows = walk.q[units], walk.k[units], walk.v[units], y
        end, made = _deep_block.forward(*rows, start, scales, walk.act, keep=keep, **options)
        tape = [t for part in made for t in part]
    working.put(end)
    return tape


def _backward(
    walk: Walk, block: Block, tape: Sequence[Tensor], grad: Tensor, working: Working, aim: Target, to_rows: Sequence[Tensor]
) -> None:
    """Adjoint of `_forward`: brings the gradient to the state from the block's end to its start, fills the block's part of those to
    q, k and v, and has the gates and the target collect theirs."""
    units, to_pairs, target, norm = block.units, working.take(block), aim.take(block), walk.norm(block)
    rooms = [t[units] for t in to_rows]
    if block.mixed:
        out, to_pairs, to_target = _deep_mixed.backward(walk, block, tape, grad, to_pairs, target, norm)
    else:
        scales = walk.gates.block_scales(units, block.ended)
        totals = walk.gates.block_totals(units)
        kept = Tape.of(tape, **walk.loss)
        out = _deep_block.backward(grad, to_pairs, walk.q[units], walk.k[units], kept, scales, totals, rooms, target, norm)
        walk.gates.collect_block(totals, units, block.ended)
        to_pairs, to_target = out.pairs, out.target
    working.put(to_pairs)
    aim.collect(block, to_target)
    walk.collect_norm(block, out.norm)
    for room, rows in zip(rooms, (out.q, out.k, out.v)):
        if rows is not room:
            room[..., : rows.shape[-1]] = rows


def _again(walk: Walk, group: list[Block], initial: list[Tensor], saved: list[Tensor] | None, aim: Target) -> list[list[Tensor]]:
    """The tapes of a group's blocks. What was locked at the group's start still holds its initial values."""
    working = Working(walk, [t.clone() for t in initial])
    if saved is not None:
        working.take(group[0])
        working.put(saved)
    return [_forward(walk, block, working, aim, torch.empty_like(walk.v[block.units]), keep=True) for block in group]


def _kept(walk: Walk, groups: list[list[Block]], limit: int) -> int:
    """How many groups, from the first, have tapes that fit into so many bytes."""
    total = 0
    for number, group in enumerate(groups):
        total += walk.tape_bytes(group)
        if total > limit:
            return number
    return len(groups)


def _take_tape(walk: Walk, block: Block, tapes: list[Tensor]) -> list[Tensor]:
    """The last tape, which is that of the block."""
    depth = len(walk.places)
    count = depth if block.mixed else Tape.count(depth, **walk.loss)
    taken = tapes[-count:]
    del tapes[-count:]
    return taken


def _most_saved(q: Tensor, weights: list[Tensor], chunk: int) -> int:
    """A bound on how many rows' states are saved, whatever the positions and documents."""
    return (q.shape[0] * q.shape[1] + weights[0].shape[0] * (chunk - 1)) // (chunk * GROUP)


def _saved_shapes(walk: Walk, groups: list[list[Block]], kept: int) -> dict[int, list[tuple[int, ...]]]:
    """The states to save, by the number of the group they are the start of: the shape of each layer's pair."""
    starts = {number: group[0] for number, group in enumerate(groups) if number and number >= kept}
    return {number: [(first.rows, 2, *shape) for shape in walk.shapes(first.width)] for number, first in starts.items()}


def _saved(walk: Walk, groups: list[list[Block]], kept: int, most: int | None, save: bool) -> list[Tensor]:
    """Flat tensors for the saved states of each layer: of the size in use, or for `most` rows' states at their largest."""
    if not save:
        return []
    depth = len(walk.places)
    sizes = [sum(map(prod, layer)) for layer in zip(*_saved_shapes(walk, groups, kept).values())] or [0] * depth
    if most is not None:
        sizes = [2 * most * walk.heads * prod(shape) for shape in walk.shapes(walk.dim)]
    return [walk.v.new_empty(size) for size in sizes]


def _saved_parts(walk: Walk, groups: list[list[Block]], kept: int, saved: list[Tensor]) -> dict[int, list[Tensor]]:
    """The saved states as views into their flat tensors."""
    shapes = _saved_shapes(walk, groups, kept) if saved else {}
    used, parts = [0] * len(walk.places), {}
    for number, layers in shapes.items():
        parts[number] = [flat[u : u + prod(shape)].view(shape) for flat, u, shape in zip(saved, used, layers)]
        used = [u + prod(shape) for u, shape in zip(used, layers)]
    return parts


def check_position(offset: int | Tensor, position: Tensor | None) -> None:
    """Raise ValueError (on CUDA, assert on the device) where the offset (N or 1) is not the position (N), if one is given."""
    if position is None:
        return
    same = position.eq(offset if isinstance(offset, int) else offset.to(position.device)).all()
    if same.is_cuda:
        torch._assert_async(same, "the state's position is not the offset of the activation")
    elif not same:
        starts = offset if isinstance(offset, int) else offset.tolist()
        raise ValueError(
            f"the state stands at positions {position.tolist()} but the activation starts at {starts}; "
            "give the activation the state's position as offset"
        )


@titans_scan.register_fake
def _(*inputs: Any) -> list[Tensor]:
    tokens, _, weights, momentum, *_, chunk, _, _, _, save, _ = inputs
    state = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (*weights, *momentum)]
    most = _most_saved(tokens[0], weights, chunk)
    saved = [t.new_empty(2 * most * t[0].numel()) for t in weights] if save else []
    return [torch.empty_like(tokens[2], memory_format=torch.contiguous_format), *state, *saved]


@titans_scan_backward.register_fake
def _(*inputs: Any) -> list[Tensor]:
    _, *lists = inputs[:7]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for part in lists for t in part]


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    *lists, active, open_active, offset, _, cu_seqlens, chunk, read, memory_activation, clip, _, _ = inputs
    lists.append(output[1 + 2 * len(lists[2]) :])
    ctx.counts, ctx.options = [len(part) for part in lists], (chunk, read, memory_activation, clip)
    ctx.save_for_backward(*(t for part in lists for t in part), active, open_active, offset, cu_seqlens)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple:
    flat = list(ctx.saved_tensors)
    lists = [[flat.pop(0) for _ in range(count)] for count in ctx.counts]
    tokens, _, weights, momentum, *_ = lists
    shapes = [tokens[2], *weights, *momentum]
    given = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, shapes)]
    out = iter(titans_scan_backward(given, *lists, *flat, *ctx.options))
    return (*([next(out) for _ in range(count)] for count in ctx.counts[:6]), *[None] * 11)


titans_scan.register_autograd(_gradients, setup_context=_setup)
