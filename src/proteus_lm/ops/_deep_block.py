"""A run of chunks of an MLP memory in its exact dual form, forward and backward (spec/deep.md 2.1-2.4), for any depth, where the
open width is the same for all tokens of all these chunks.

Gradients of a chunk's tokens are taken at the weights of the chunk's start; decay, momentum and reads stay exact per token, and no
token's weights are ever built. Only writes feed the next chunk, so they go chunk by chunk and the reads of all chunks go together.

U = rows times heads, b = tokens of a chunk, V = U times the chunks of the run. Weights and momentum of a layer are one tensor, its
`pair` (U, 2, n, w), hidden units last: (in, out) of each layer but the last, (out, in) of the last. Then in every layer one side of
the tokens' part is narrow, n wide (what a layer takes in; of the last layer, the gradient of what it puts out), and the other w.
Both halves of a pair are worked on in one product: narrow rows are scaled twice and stand side by side, (b, 2 n).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proteus_lm.ops._deep_activation import Pointwise
from proteus_lm.ops._deep_loss import Loss, clip_factors, norm_gradient


class BlockScales(NamedTuple):
    """How much of what is in the memory at each chunk's reads and at its end.

    Args:
        reads: (V, b, 2), of the start's weights and momentum in the weights at each read.
        less: (V, b, b), of each token's gradient in the weights at each read; negative, as a token goes against it.
        step: (V, 2, 2), of the start's (weights, momentum), columns, in those of the end, rows.
        ends: (V, b, 2), of each token's gradient in the weights and in the momentum at the end, to be subtracted.
    """

    reads: Tensor
    less: Tensor
    step: Tensor
    ends: Tensor


class Tape(NamedTuple):
    """What the backward of a run needs and would be dear to work out again; layers L, of which L - 1 are followed by an activation.

    Args:
        pairs: (V, 2, n, w) L times, at each chunk's start.
        x, slope, curve: (V, b, w) L - 1 times, of the write side: f(z), f'(z), and f''(z) times the loss's gradient to f(z).
        g: (V, b, w) L - 1 times, then (V, b, out), the loss's gradient to what each layer puts out.
        seen, rise: (V, b, w) L - 1 times, f and f' of the read side.
        similarity: (V, b, b) L - 1 times, read rows times written rows in the layers behind the first.
        answers: (V, b, 2 out) once, the last layer's answers by the start's weights and momentum.
        clipped: (V, b, 1) once, or nothing: factors of `clip_factors`, which are in g and curve already.
        normed: of a residual memory, the `Normed` of its write side; or nothing.
    """

    pairs: Sequence[Tensor]
    x: Sequence[Tensor]
    slope: Sequence[Tensor]
    curve: Sequence[Tensor]
    g: Sequence[Tensor]
    seen: Sequence[Tensor]
    rise: Sequence[Tensor]
    similarity: Sequence[Tensor]
    answers: Sequence[Tensor]
    clipped: Sequence[Tensor]
    normed: Sequence[Tensor]

    @staticmethod
    def of(flat: Sequence[Tensor], *, clip: bool, norm: bool) -> Tape:
        """From all its tensors in order."""
        rest, plain = iter(flat), len(flat) - clip - 3 * norm
        return Tape(*([next(rest) for _ in range(count)] for count in Tape._counts((plain + 5) // 8, clip, norm)))

    @staticmethod
    def count(depth: int, *, clip: bool, norm: bool) -> int:
        """How many tensors it is."""
        return sum(Tape._counts(depth, clip, norm))

    @staticmethod
    def _counts(depth: int, clip: bool, norm: bool) -> list[int]:
        return [depth, *[depth - 1] * 3, depth, *[depth - 1] * 3, 1, int(clip), 3 * norm]


def tape_size(units: int, slots: int, shapes: Sequence[tuple[int, int]], *, clip: bool, norm: bool) -> int:
    """Numbers in the tape of so many units, for pairs of (n, w)."""
    hidden, (out, width) = len(shapes) - 1, shapes[-1]
    rows = 6 * hidden * width + hidden * slots + 3 * out + clip + norm * (2 * out + 1)
    return units * (2 * sum(n * w for n, w in shapes) + slots * rows)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    start: Sequence[Tensor],
    scales: BlockScales,
    act: Pointwise,
    *,
    keep: bool,
    clip: float | None = None,
    target: Sequence[Tensor] = (),
    norm: Sequence[Tensor] = (),
) -> tuple[list[Tensor], Tape]:
    """Write and read a run of chunks. q, k (V, b, D), v (V, b, Dv); `start` are the pairs (U, 2, n, w), which stay as they are.

    Args:
        y: (V, b, Dv), where the answers go.
        clip: limit of a token's gradient; None: there is none.
        target: (U, n, w) of each layer, what the weights decay to; nothing: to zero.
        norm: of a residual memory, gain and bias (U, 1, Dv): v is then v - k, and y what the last layer puts out; else nothing.

    Returns:
        The pairs at the run's end; the tape, of which `curve` is missing without `keep`.
    """
    depth, units = len(start), len(start[0])
    rounds, wide = len(k) // units, (*k.shape[:2], start[0].shape[-1])
    pairs, new = list(start), [torch.empty_like(s) for s in start]
    if rounds > 1:
        pairs = [s.new_empty(rounds * units, *s.shape[1:]) for s in start]
        for pair, first in zip(pairs, start):
            pair[:units].copy_(first)
    x, slope, g = ([k.new_empty(wide) for _ in range(depth - 1)] for _ in range(3))
    curve = [k.new_empty(wide) for _ in x if keep]
    g.append(torch.empty_like(v))
    clipped = [] if clip is None else [v.new_empty(*v.shape[:2], 1)]
    normed = [v.new_empty(*v.shape[:2], n) for n in (v.shape[-1], 1, v.shape[-1]) if norm]
    inputs = [_taken(k, start), *x]
    olds = _rounds(pairs, rounds)
    parts = (inputs, slope, curve, g, clipped, normed, [v, *scales])
    by_round = zip(olds, [*olds[1:], new], *(_rounds(part, rounds) for part in parts))
    for old, end, xs, slopes, curves, gs, factors, kept, (values, _, _, step, ends) in by_round:
        _write(values, old, xs, slopes, curves, gs, act, norm, kept)
        if clip is not None:
            factors[0].copy_(clip_factors(clip, xs, gs))
            for rows in (*gs, *curves):
                rows.mul_(factors[0])
        for layer in range(depth):
            _advance(old[layer], end[layer], *_sides(layer, xs, gs), step, ends)
        for aim, pair in zip(target, end):
            pair[:, 0].addcmul_(aim, 1 - step[:, :1, :1])
    reading = _read(q, y, pairs, inputs, g, scales, act, _repeated(target, rounds), keep=keep)
    return new, Tape(pairs, x, slope, curve, g, *reading, clipped, normed)


def _write(
    v: Tensor,
    pairs: Sequence[Tensor],
    x: Sequence[Tensor],
    slope: Sequence[Tensor],
    curve: Sequence[Tensor],
    g: Sequence[Tensor],
    act: Pointwise,
    norm: Sequence[Tensor],
    normed: Sequence[Tensor],
) -> None:
    """Gradients g of 1/2 ||f(k) - v||^2 at a chunk's start weights, x[0] being k; fills the other x, and curve and normed where
    given."""
    depth = len(pairs)
    for layer in range(depth - 1):
        act.expand(x[layer].bmm(pairs[layer][:, 0]), x[layer + 1], slope[layer], curve[layer] if curve else None)
    if norm:
        gradient, kept = norm_gradient(x[-1].bmm(pairs[-1][:, 0].mT), v, *norm)
        for room, rows in zip((g[-1], *normed), (gradient, *kept)):
            room.copy_(rows)
    else:
        torch.baddbmm(v, x[-1], pairs[-1][:, 0].mT, beta=-1, out=g[-1])
    for layer in range(depth - 2, -1, -1):
        h = g[layer + 1].bmm(_inward(pairs, layer + 1))
        torch.mul(h, slope[layer], out=g[layer])
        if curve:
            curve[layer].mul_(h)


def _advance(pair: Tensor, new: Tensor, narrow: Tensor, wide: Tensor, step: Tensor, ends: Tensor) -> None:
    """Bring a pair from a chunk's start to its end, into `new`."""
    # The start's weights are never in the momentum.
    decay, carry, _, keep = _gains(step)
    (weights, momentum), (to_weights, to_momentum) = pair.unbind(1), new.unbind(1)
    torch.mul(weights, decay, out=to_weights).addcmul_(momentum, carry)
    torch.mul(momentum, keep, out=to_momentum)
    new.flatten(1, 2).baddbmm_(_twice(narrow, ends).mT, wide, alpha=-1)


def _read(
    q: Tensor,
    y: Tensor,
    pairs: Sequence[Tensor],
    x: Sequence[Tensor],
    g: Sequence[Tensor],
    scales: BlockScales,
    act: Pointwise,
    target: Sequence[Tensor],
    *,
    keep: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Fill in what the memory answers to q with each token's own weights, layer by layer:
    decay (x W) + carry (x S) - (mix o x X^T) G, and (1 - decay) (x T) where there is a target T, (V, n, w)."""
    seen, rise, similarity = [_taken(q, pairs)], [], []
    for layer, pair in enumerate(pairs[:-1]):
        z = _twice(seen[-1], scales.reads).bmm(pair.flatten(1, 2))
        similarity.append(seen[-1].bmm(x[layer].mT))
        z.baddbmm_(similarity[-1] * scales.less, g[layer])
        if target:
            z.baddbmm_(seen[-1] * _decayed(scales), target[layer])
        seen.append(torch.empty_like(z))
        rise.append(torch.empty_like(z) if keep else seen[-1])
        act.expand(z, seen[-1], rise[-1] if keep else None)
    similarity.append(seen[-1].bmm(x[-1].mT))
    answers = seen[-1].bmm(pairs[-1].flatten(1, 2).mT)
    _once(answers, scales.reads, y).baddbmm_(similarity[-1] * scales.less, g[-1])
    if target:
        y.baddbmm_(seen[-1] * _decayed(scales), target[-1].mT)
    return seen[1:], rise, similarity[1:], [answers]


class Gradients(NamedTuple):
    """What `backward` gives: to the tokens (of q and k, what the first layer takes in), start pairs, target and norm."""

    q: Tensor
    k: Tensor
    v: Tensor
    pairs: list[Tensor]
    target: list[Tensor]
    norm: list[Tensor]


def backward(
    grad: Tensor,
    to_pairs: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    tape: Tape,
    scales: BlockScales,
    totals: BlockScales,
    rooms: Sequence[Tensor],
    target: Sequence[Tensor] = (),
    norm: Sequence[Tensor] = (),
) -> Gradients:
    """Adjoint of `forward`; the factors of clipping are constants.

    Args:
        grad: (V, b, Dv), with respect to y.
        to_pairs: (U, 2, n, w), with respect to the pairs at the end.
        totals: where to put what is with respect to the scales; zeros, but for `less`.
        rooms: where gradients to q, k and v (V, b, .) go, where they are as wide.
    """
    depth, units = len(to_pairs), len(to_pairs[0])
    rounds = len(k) // units
    x = [_taken(k, to_pairs), *tape.x]
    to_q, to_x, to_g, added, at_reads = _read_backward(grad, q, x, tape, scales, totals, rooms, _repeated(target, rounds))
    to_target = [t.unflatten(0, (rounds, units)).sum(0) for t in at_reads]
    narrow = [_sides(layer, x, tape.g)[0] for layer in range(depth)]
    twice = [_twice(rows, scales.ends) for rows in narrow]
    products = [torch.empty_like(t) for t in twice]
    gates = [*scales.ends.split(1, -1), scales.step, totals.step]
    reads = [t for pair in added for t in pair]
    to_norm, to_v = [torch.zeros_like(t) for t in norm], [torch.empty_like(tape.g[-1])] if norm else []
    parts = (tape.pairs, x, tape.slope, tape.curve, tape.g, to_x, to_g, twice, products, reads, gates)
    losses = zip(*(_rounds(part, rounds) for part in (tape.clipped, tape.normed, to_v)))
    by_round = reversed(list(zip(*(_rounds(part, rounds) for part in parts), losses)))
    for old, xs, slopes, curves, gs, to_xs, to_gs, scaled, ended, reads, (end, end_momentum, step, to_step), loss in by_round:
        starts = []
        for layer, to_new in enumerate(to_pairs):
            wide, (to_narrow, to_wide) = _sides(layer, xs, gs)[1], _sides(layer, to_xs, to_gs)
            flat, halves = to_new.flatten(1, 2), to_new.flatten(2)
            torch.bmm(wide, flat.mT, out=ended[layer])
            left, right = ended[layer].chunk(2, -1)
            to_narrow.addcmul_(left, end, value=-1).addcmul_(right, end_momentum, value=-1)
            to_wide.baddbmm_(scaled[layer], flat, alpha=-1)
            to_step.baddbmm_(halves, old[layer].flatten(2).mT)
            starts.append(_step_backward(to_new, step))
            starts[-1].flatten(1, 2).baddbmm_(reads[2 * layer].mT, reads[2 * layer + 1])
            if target:
                to_target[layer].addcmul_(to_new[:, 0], 1 - step[:, :1, :1])
                to_step[:, 0, 0].sub_((to_new[:, 0] * target[layer]).sum((1, 2)))
        clipped, normed, to_values = loss
        _write_backward(to_xs, to_gs, starts, old, xs, slopes, curves, gs, Loss(clipped, normed, norm, to_norm, to_values))
        to_pairs = starts
    for rows, product in zip(narrow, products):
        _add_dots(totals.ends, product, rows, -1)
    return Gradients(to_q, to_x[0], to_v[0] if norm else to_g[-1].neg_(), list(to_pairs), to_target, to_norm)


def _step_backward(to_new: Tensor, step: Tensor) -> Tensor:
    """From the gradient to a pair at a chunk's end, what of it comes to its start."""
    decay, carry, _, keep = _gains(step)
    start = torch.empty_like(to_new)
    (to_weights, to_momentum), (weights, momentum) = to_new.unbind(1), start.unbind(1)
    torch.mul(to_weights, decay, out=weights)
    torch.mul(to_momentum, keep, out=momentum).addcmul_(to_weights, carry)
    return start


def _read_backward(
    grad: Tensor,
    q: Tensor,
    x: Sequence[Tensor],
    tape: Tape,
    scales: BlockScales,
    totals: BlockScales,
    rooms: Sequence[Tensor],
    target: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor], list[Tensor], list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Adjoint of `_read`: gradients to q, x and g, for each layer the rows whose product is that to its pair; those to target."""
    depth, reads = len(tape.pairs), scales.reads
    seen = [_taken(q, tape.pairs), *tape.seen]
    to_x: list[Tensor] = [grad] * depth
    to_g: list[Tensor] = [grad] * depth
    added = [(grad, grad)] * depth
    to_target = list(target)
    for layer in range(depth - 1, -1, -1):
        last = layer == depth - 1
        similarity = tape.similarity[layer - 1] if layer else seen[0].bmm(x[0].mT)
        to_kept = grad.bmm(tape.g[layer].mT)
        flat = tape.pairs[layer].flatten(1, 2)
        if last:
            torch.mul(to_kept, similarity, out=totals.less)
            _add_dots(totals.reads, tape.answers[0], grad, 1)
            added[layer] = _twice(grad, reads), seen[layer]
            to_seen = added[layer][0].bmm(flat)
        else:
            totals.less.addcmul_(to_kept, similarity)
            to_rows = grad.bmm(flat.mT)
            _add_dots(totals.reads, to_rows, seen[layer], 1)
            added[layer] = _twice(seen[layer], reads), grad
            to_seen = _once(to_rows, reads, None if layer else rooms[0])
        if target:
            to_target[layer] = _target_backward(grad, seen[layer], target[layer], scales, totals, to_seen, last=last)
        to_g[layer] = torch.bmm((similarity * scales.less).mT, grad, out=rooms[2] if last else None)
        to_kept.mul_(scales.less)
        to_x[layer] = torch.bmm(to_kept.mT, seen[layer], out=None if layer else _room(rooms[1], seen[0].shape[-1]))
        grad = to_seen.baddbmm_(to_kept, x[layer])
        if layer:
            grad.mul_(tape.rise[layer - 1])
    return grad, to_x, to_g, added, to_target


def _target_backward(
    grad: Tensor, x: Tensor, target: Tensor, scales: BlockScales, totals: BlockScales, to_x: Tensor, *, last: bool
) -> Tensor:
    """Adjoint of a layer's (1 - decay) (x T): gradient to T; adds to `to_x` and to that of the decay."""
    decayed = _decayed(scales)
    product = grad.bmm(target if last else target.mT)
    totals.reads[..., 0].sub_((product * x).sum(-1))
    to_x.addcmul_(product, decayed)
    left, right = (grad, x) if last else (x, grad)
    return (left * decayed).mT.bmm(right)


def _write_backward(
    to_x: Sequence[Tensor],
    to_g: Sequence[Tensor],
    to_pairs: Sequence[Tensor],
    pairs: Sequence[Tensor],
    x: Sequence[Tensor],
    slope: Sequence[Tensor],
    curve: Sequence[Tensor],
    g: Sequence[Tensor],
    loss: Loss,
) -> None:
    """Adjoint of one chunk's write side, in place: adds to `to_pairs`. The first loop is the second order part: the way into the
    inner gradients.

    g and curve hold the factors of clipping, so `to_g` need not until the way leads out of the last layer's gradient.
    """
    depth = len(pairs)
    to_weights = [torch.empty_like(t[:, 0]) for t in to_pairs]
    for layer in range(depth - 1):
        to_h = to_g[layer] * slope[layer]
        to_g[layer].mul_(curve[layer])  # now the gradient to z
        to_g[layer + 1].baddbmm_(to_h, _inward(pairs, layer + 1).mT)
        left, right = (g[layer + 1], to_h) if layer + 2 == depth else (to_h, g[layer + 1])
        torch.bmm(left.mT, right, out=to_weights[layer + 1])
    last = loss.leave(to_g[-1])
    to_x[-1].baddbmm_(last, pairs[-1][:, 0])
    _add_product(to_weights, depth - 1, last, x[-1])
    for layer in range(depth - 2, -1, -1):
        to_g[layer].addcmul_(to_x[layer + 1], slope[layer])
        to_x[layer].baddbmm_(to_g[layer], pairs[layer][:, 0].mT)
        _add_product(to_weights, layer, x[layer], to_g[layer])
    for pair, weight in zip(to_pairs, to_weights):
        pair[:, 0].add_(weight)


def _add_product(totals: Sequence[Tensor], layer: int, left: Tensor, right: Tensor) -> None:
    """Add left^T right to a layer's total, which the first layer has not yet."""
    if layer:
        totals[layer].baddbmm_(left.mT, right)
    else:
        torch.bmm(left.mT, right, out=totals[layer])


def _sides(layer: int, x: Sequence[Tensor], g: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The narrow and the wide side of a layer, of what it takes in and the gradients of what it puts out."""
    return (g[layer], x[layer]) if layer + 1 == len(g) else (x[layer], g[layer])


def _inward(pairs: Sequence[Tensor], layer: int) -> Tensor:
    """Weights (out, in) of a layer, by which a gradient goes back."""
    weight = pairs[layer][:, 0]
    return weight if layer + 1 == len(pairs) else weight.mT


def _taken(rows: Tensor, pairs: Sequence[Tensor]) -> Tensor:
    """What the first layer takes in of q or k: all of it, or what is open where a single layer's rows are scheduled."""
    return rows if len(pairs) > 1 else rows[..., : pairs[0].shape[-1]]


def _decayed(scales: BlockScales) -> Tensor:
    """(V, b, 1): how much of the target has come in for what has decayed of the start's weights, at each read."""
    return 1 - scales.reads[..., :1]


def _repeated(target: Sequence[Tensor], rounds: int) -> Sequence[Tensor]:
    """(U, n, w) for each chunk of a run, (V, n, w)."""
    return target if rounds == 1 else [t.repeat(rounds, 1, 1) for t in target]


def _rounds(parts: Sequence[Tensor], rounds: int) -> Sequence[Sequence[Tensor]]:
    """Tensors (V, ...) as those of each chunk, (U, ...)."""
    if rounds == 1:
        return [tuple(parts)]
    return list(zip(*(t.unflatten(0, (rounds, -1)).unbind() for t in parts))) if parts else [()] * rounds


def _twice(rows: Tensor, scales: Tensor) -> Tensor:
    """Rows (V, b, n) scaled by each of (V, b, 2), side by side."""
    n = rows.shape[-1]
    out = rows.new_empty(*rows.shape[:-1], 2 * n)
    torch.mul(rows, scales[..., :1], out=out[..., :n])
    torch.mul(rows, scales[..., 1:], out=out[..., n:])
    return out


def _once(rows: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """Adjoint of `_twice` with respect to the rows: the two halves of (V, b, 2 n), scaled and added."""
    n = rows.shape[-1] // 2
    return torch.mul(rows[..., :n], scales[..., :1], out=out).addcmul_(rows[..., n:], scales[..., 1:])


def _gains(step: Tensor) -> Sequence[Tensor]:
    """(U, 2, 2) as (U, 1, 1) each, row by row."""
    return step.view(-1, 4, 1, 1).unbind(1)


def _room(room: Tensor, width: int) -> Tensor | None:
    """Where rows of this width go: the room for them (V, b, n), if it is as wide."""
    return room if room.shape[-1] == width else None


def _add_dots(total: Tensor, rows: Tensor, single: Tensor, sign: int) -> None:
    """Add to (V, b, 2), contiguous, the adjoint of `_twice` with respect to the scales, from rows (V, b, 2 n), times the sign."""
    n = single.shape[-1]
    total.view(-1, 2, 1).baddbmm_(rows.view(-1, 2, n), single.reshape(-1, n, 1), alpha=sign)
