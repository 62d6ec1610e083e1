"""One chunk of an MLP memory in its exact dual form, forward and backward (spec/deep.md 2.1-2.4 and 3.4), for any depth.

Gradients of a chunk's tokens are taken at the weights of the chunk's start; decay, momentum and reads stay exact per token, and no
token's weights are ever built. U = rows times heads, b = tokens of the chunk; layer l maps `in` to `out` coordinates, and W, S are
its weights and momentum at the chunk's start, both (U, in, out), cut to the coordinates that are open to some token. A gated
memory has two such matrices in each hidden layer, which take in the same: L layers, n = 2 (L - 1) + 1 matrices; else n = L.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proteus_lm.ops._deep_activation import Pointwise
from proteus_lm.ops._deep_loss import Loss, clip_factors, norm_gradient
from proteus_lm.ops.memory_activations import layers, places


class Scales(NamedTuple):
    """How much of what is in the memory at a chunk's reads and at its end. The last dimension is 1, or w = the open coordinates
    where they do not share one history in this chunk (then `mask` says which are open to each token).

    Args:
        decay: (U, b, 1 or w), of the start weights at each read.  carry: likewise, of the start momentum.
        mix: (U, b, b), of each token's gradient at each read.
        end_decay, end_carry, end_momentum: (U, 1 or w), at the end: of W in W, of S in W, of S in S.
        end_mix, end_momentum_mix: (U, b, 1), at the end: of each token's gradient in W and in S.
        mask: bool (U, b, w), or None where all w are open to all tokens.
    """

    decay: Tensor
    carry: Tensor
    mix: Tensor
    end_decay: Tensor
    end_carry: Tensor
    end_momentum: Tensor
    end_mix: Tensor
    end_momentum_mix: Tensor
    mask: Tensor | None = None


class Written(NamedTuple):
    """The write side of a chunk at its start weights: what each matrix takes in, x (n), pre-activations z and the slopes by them
    (n - 1), and the loss's gradients h with respect to the activations (L - 1) and g with respect to what each matrix puts out (n).
    Where gradients are clipped, `clipped` is (U, b, 1) once, the factors of `clip_factors`, which are in h and g already; else
    nothing. `normed` is the `Normed` of a residual memory, else nothing."""

    x: list[Tensor]
    z: list[Tensor]
    slope: list[Tensor]
    h: list[Tensor]
    g: list[Tensor]
    clipped: list[Tensor]
    normed: list[Tensor]

    @property
    def arity(self) -> int:
        """Matrices of a hidden layer."""
        return len(self.z) // len(self.h) if self.h else 1


class Reading(NamedTuple):
    """The read side of a chunk: layer inputs x (L), slopes (n - 1), similarities x X^T (L), kept products (n)."""

    x: list[Tensor]
    slope: list[Tensor]
    similarity: list[Tensor]
    kept: list[tuple]


def entries(opened: Tensor, place: str) -> Tensor:
    """Open entries of a layer's matrix, broadcastable to (U, in, out), from open coordinates, bool (U, w): those with all open."""
    rows, columns = opened[:, :, None], opened[:, None, :]
    return columns if place == "first" else rows if place == "last" else rows & columns


def opening(active: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """From the open coordinates at each slot, int (N, b), 0 where there is no token, for the first `width` coordinates: the slot at
    which each opens, int64 (N, w), b where it does not; and whether each is open to each token, bool (N, b, w)."""
    mask = torch.arange(width, device=active.device) < active[..., None]
    return torch.where(mask.any(1), mask.to(torch.uint8).argmax(1), active.shape[1]), mask


def by_entry(scale: Tensor, place: str) -> Tensor:
    """A value per hidden unit (U, w) as one per entry of a layer's matrix, broadcastable to (U, in, out).

    An inner entry takes that of its later unit. Units open in order, so the entry opens with that unit.
    """
    if scale.shape[-1] == 1 or place == "first":
        return scale[:, None, :]
    if place == "last":
        return scale[:, :, None]
    return torch.where(_upper(scale.shape[-1], scale.device), scale[:, None, :], scale[:, :, None])


def by_entry_backward(grad: Tensor, place: str, shared: bool) -> Tensor:
    """Adjoint of `by_entry`: gradient (U, in, out) to (U, w), or to (U, 1) where all units share one value."""
    if shared:
        return grad.sum((1, 2))[:, None]
    if place != "inner":
        return grad.sum(1 if place == "first" else 2)
    return grad.triu().sum(1) + grad.tril(-1).sum(2)


def write(
    k: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    act: Pointwise,
    mask: Tensor | None,
    clip: float | None = None,
    norm: Sequence[Tensor] = (),
) -> Written:
    """Gradients of 1/2 ||f(k) - v||^2 at the start weights, a token's no longer than `clip`. k (U, b, D), v (U, b, Dv).

    Of a residual memory, `norm` is gain and bias (U, 1, Dv), and v is v - k.
    """
    x, z, slope = [], [], []
    taken, order = _taken(k, weights, mask), layers(len(weights), act.arity)
    for layer in order[:-1]:
        x += [taken] * act.arity
        z += [taken.bmm(weight) for weight in weights[layer]]
        taken = _open(act.join(z[layer]), mask)
        slope += _slopes(z[layer], act, mask)
    x.append(taken)
    g, h, normed = [], [], []
    if norm:
        gradient, kept = norm_gradient(x[-1].bmm(weights[-1]), v, *norm)
        g, normed = [gradient], list(kept)
    else:
        g = [torch.baddbmm(v, x[-1], weights[-1], beta=-1)]
    for layer, above in reversed(list(zip(order, order[1:]))):
        h.insert(0, _sum_of_products(g, [weight.mT for weight in weights[above]]))
        g = [*(h[0] * rise for rise in slope[layer]), *g]
    if clip is None:
        return Written(x, z, slope, h, g, [], normed)
    factors = clip_factors(clip, x, g)
    return Written(x, z, slope, [t * factors for t in h], [t * factors for t in g], [factors], normed)


def read(
    q: Tensor,
    weights: Sequence[Tensor],
    momentum: Sequence[Tensor],
    written: Written,
    scales: Scales,
    act: Pointwise,
    *,
    keep: bool,
    target: Sequence[Tensor] = (),
) -> tuple[Tensor, Reading]:
    """What the memory answers to q (U, b, D) with each token's own weights: y (U, b, Dv), and with `keep` what `backward` needs.

    Layer by layer z = decay (x W) + carry (x S) - (mix o x X^T) G. Where the weights decay to a target T, (U, in, out) of each
    layer, it is decay (x (W - T)) + x T + .. .
    """
    mask, order, sides = scales.mask, layers(len(weights), act.arity), places(len(weights), act.arity)
    reading, z = Reading([_taken(q, weights, mask)], [], [], []), []
    for layer in order:
        x, z = reading.x[-1], []
        similarity = x.bmm(written.x[layer][0].mT)
        mixed = scales.mix * similarity
        for matrix in range(len(weights))[layer]:
            w = weights[matrix] - target[matrix] if target else weights[matrix]
            rows, kept = _remembered(x, w, momentum[matrix], scales, _side(sides[matrix], w, mask))
            if target:
                rows.baddbmm_(x, target[matrix])
            z.append(rows.baddbmm_(mixed, written.g[matrix], alpha=-1))
            reading.kept.append(kept)
        reading.similarity.append(similarity)
        if layer != order[-1]:
            reading.x.append(_open(act.join(z), mask))
            if keep:
                reading.slope.extend(_slopes(z, act, mask))
    return z[0], reading


def advance(
    weights: Sequence[Tensor], momentum: Sequence[Tensor], written: Written, scales: Scales, target: Sequence[Tensor] = ()
) -> None:
    """Bring weights and momentum from the chunk's start to its end, in place; `target` as in `read`."""
    for layer, place in enumerate(places(len(weights), written.arity)):
        w, s, x, g = weights[layer], momentum[layer], written.x[layer], written.g[layer]
        decay, carry, keep = (by_entry(t, place) for t in (scales.end_decay, scales.end_carry, scales.end_momentum))
        w.mul_(decay).addcmul_(s, carry)
        if target:
            w.addcmul_(target[layer], 1 - decay)
        s.mul_(keep)
        for state, mix in ((w, scales.end_mix), (s, scales.end_momentum_mix)):
            pair = (x * mix, g) if x.shape[-1] <= g.shape[-1] else (x, g * mix)
            state.baddbmm_(pair[0].mT, pair[1], alpha=-1)


class Gradients(NamedTuple):
    """What `backward` gives: to the tokens (of q and k, what the first layer takes in), scales (no `mask`), target and norm."""

    q: Tensor
    k: Tensor
    v: Tensor
    scales: Scales
    target: list[Tensor]
    norm: list[Tensor]


def backward(
    grad: Tensor,
    grad_weights: Sequence[Tensor],
    grad_momentum: Sequence[Tensor],
    weights: Sequence[Tensor],
    momentum: Sequence[Tensor],
    written: Written,
    reading: Reading,
    scales: Scales,
    act: Pointwise,
    *,
    advanced: bool,
    target: Sequence[Tensor] = (),
    norm: Sequence[Tensor] = (),
) -> Gradients:
    """Adjoint of `write`, `read` and `advance` together; the factors of clipping are constants.

    Args:
        grad: (U, b, Dv), with respect to y.
        grad_weights, grad_momentum: with respect to the state at the chunk's end; become those to the state at its start, in place.
        advanced: False when the chunk ends nothing, so that its end state is its start state.
    """
    mask, order, sides = scales.mask, layers(len(weights), act.arity), places(len(weights), act.arity)
    sums = Scales._make([*(torch.zeros_like(t) for t in scales[:8]), None])
    less = -scales.mix
    to_x: list[Tensor] = [grad] * len(order)
    to_g: list[Tensor] = [grad] * len(weights)
    to_target = list(target)
    to_z = [grad]
    for number, layer in reversed(list(enumerate(order))):
        x, written_x, similarity = reading.x[number], written.x[layer][0], reading.similarity[number]
        pair = _sum_of_products(to_z, [g.mT for g in written.g[layer]])
        sums.mix.addcmul_(pair, similarity, value=-1)
        pair.mul_(less)
        weighted = (similarity * less).mT
        to_x[number] = pair.mT.bmm(x)
        below = pair.bmm(written_x)
        for matrix, above in zip(range(len(weights))[layer], to_z):
            place, w, s = sides[matrix], weights[matrix], momentum[matrix]
            w = w - target[matrix] if target else w
            to_w, to_s, g = grad_weights[matrix], grad_momentum[matrix], written.g[matrix]
            to_g[matrix] = weighted.bmm(above)
            at_end = to_w.clone() if target else None
            if advanced:
                _end_rows_backward(to_w, to_s, written_x, g, scales, sums, to_x[number], to_g[matrix])
                _end_state_backward(to_w, to_s, w, s, scales, sums, place)
            kept = reading.kept[matrix]
            below.add_(_remembered_backward(above, x, w, s, scales, sums, _side(place, w, mask), kept, to_w, to_s))
            if at_end is not None:  # W - T decays and is read, T is read, and the end is the sum of both
                to_target[matrix] = at_end.sub_(to_w).baddbmm_(x.mT, above)
                below.baddbmm_(above, target[matrix].mT)
        to_z = [below * slope for slope in reading.slope[order[number - 1]]] if number else [below]
    grad = to_z[0]
    to_norm, to_values = [torch.zeros_like(t) for t in norm], [torch.empty_like(to_g[-1])] if norm else []
    loss = Loss(written.clipped, written.normed, norm, to_norm, to_values)
    to_k, to_v = _write_backward(to_x, to_g, grad_weights, weights, written, act, mask, loss)
    if len(weights) == 1:
        grad, to_k = _open(grad, mask), _open(to_k, mask)
    return Gradients(grad, to_k, to_values[0] if norm else to_v, sums, to_target, to_norm)


def _write_backward(
    to_x: list[Tensor],
    to_g: list[Tensor],
    to_weights: Sequence[Tensor],
    weights: Sequence[Tensor],
    written: Written,
    act: Pointwise,
    mask: Tensor | None,
    loss: Loss,
) -> tuple[Tensor, Tensor]:
    """Adjoint of `write`; adds to `to_weights`. The first loop is the second order part: the way into the inner gradients.

    g and h hold the factors of clipping, so `to_g` need not until the way leads out of the last layer's gradient.
    """
    order, to_z = layers(len(weights), act.arity), []
    for number, (layer, above) in enumerate(zip(order, order[1:])):
        grads, slope = to_g[layer], written.slope[layer]
        to_h = grads[0] * slope[0]
        for more, rise in zip(grads[1:], slope[1:]):
            to_h.addcmul_(more, rise)
        bends = act.bends([grad.mul_(written.h[number]) for grad in grads], written.z[layer])
        to_z += [_open(t, mask) for t in bends]
        for matrix in range(len(weights))[above]:
            to_g[matrix].baddbmm_(to_h, weights[matrix])
            to_weights[matrix].baddbmm_(to_h.mT, written.g[matrix])
    last = loss.leave(to_g[-1])
    to_x[-1].baddbmm_(last, weights[-1].mT)
    to_weights[-1].baddbmm_(written.x[-1].mT, last)
    for number, layer in reversed(list(enumerate(order[:-1]))):
        for matrix in range(len(weights))[layer]:
            to_z[matrix].addcmul_(to_x[number + 1], written.slope[matrix])
            to_x[number].baddbmm_(to_z[matrix], weights[matrix].mT)
            to_weights[matrix].baddbmm_(written.x[matrix].mT, to_z[matrix])
    return to_x[0], last.neg()


def _end_state_backward(to_w: Tensor, to_s: Tensor, w: Tensor, s: Tensor, scales: Scales, sums: Scales, place: str) -> None:
    """Adjoint of the start state's part in `advance`, in place; adds to the end scales."""
    decay, carry, keep = (by_entry(t, place) for t in (scales.end_decay, scales.end_carry, scales.end_momentum))
    shared = scales.mask is None
    for total, grad, state in ((sums.end_decay, to_w, w), (sums.end_carry, to_w, s), (sums.end_momentum, to_s, s)):
        total.add_(by_entry_backward(grad * state, place, shared))
    to_s.mul_(keep).addcmul_(to_w, carry)
    to_w.mul_(decay)


def _end_rows_backward(
    to_w: Tensor, to_s: Tensor, x: Tensor, g: Tensor, scales: Scales, sums: Scales, to_x: Tensor, to_g: Tensor
) -> None:
    """Adjoint of the tokens' part in `advance`; adds to `to_x`, `to_g` and the end scales. Sums run over the narrower side."""
    for grad, mix, to_mix in (
        (to_w, scales.end_mix, sums.end_mix),
        (to_s, scales.end_momentum_mix, sums.end_momentum_mix),
    ):
        if x.shape[-1] <= g.shape[-1]:
            product = g.bmm(grad.mT)
            to_x.addcmul_(product, mix, value=-1)
            to_mix.sub_(product.mul_(x).sum(-1, keepdim=True))
            to_g.baddbmm_(x * mix, grad, alpha=-1)
        else:
            product = x.bmm(grad)
            to_g.addcmul_(product, mix, value=-1)
            to_mix.sub_(product.mul_(g).sum(-1, keepdim=True))
            to_x.baddbmm_(g * mix, grad.mT, alpha=-1)


def _side(place: str, weight: Tensor, mask: Tensor | None) -> str:
    """Where the scales of a read go: on what a layer takes in or puts out; with a mask this follows from where the units are."""
    if mask is not None:
        return {"first": "out", "last": "in", "inner": "both"}[place]
    return "in" if weight.shape[-2] <= weight.shape[-1] else "out"


def _remembered(x: Tensor, w: Tensor, s: Tensor, scales: Scales, side: str) -> tuple[Tensor, tuple]:
    """decay (x W) + carry (x S), and the products that the backward needs."""
    if side == "in":
        kept = x * scales.decay, x * scales.carry
        return kept[1].bmm(s).baddbmm_(kept[0], w), kept
    if side == "out":
        kept = x.bmm(w), x.bmm(s)
        return (kept[0] * scales.decay).addcmul_(kept[1], scales.carry), kept
    above, kept_above = _remembered(x, w.triu(), s.triu(), scales, "out")
    below, kept_below = _remembered(x, w.tril(-1), s.tril(-1), scales, "in")
    return above.add_(below), (kept_above, kept_below)


def _remembered_backward(
    grad: Tensor, x: Tensor, w: Tensor, s: Tensor, scales: Scales, sums: Scales, side: str, kept: tuple, to_w: Tensor, to_s: Tensor
) -> Tensor:
    """Adjoint of `_remembered`: gradient to x; adds to `to_w`, `to_s` and the read scales."""
    if side == "in":
        products = grad.bmm(w.mT), grad.bmm(s.mT)
        to_w.baddbmm_(kept[0].mT, grad)
        to_s.baddbmm_(kept[1].mT, grad)
        to_x = (products[0] * scales.decay).addcmul_(products[1], scales.carry)
        for product, total in zip(products, (sums.decay, sums.carry)):
            _add_product(total, product, x)
        return to_x
    if side == "out":
        scaled = grad * scales.decay, grad * scales.carry
        to_w.baddbmm_(x.mT, scaled[0])
        to_s.baddbmm_(x.mT, scaled[1])
        for product, total in zip(kept, (sums.decay, sums.carry)):
            _add_product(total, product, grad)
        return scaled[0].bmm(w.mT).baddbmm_(scaled[1], s.mT)
    parts = []
    for half, keep, name in ((Tensor.triu, kept[0], "out"), (lambda t: t.tril(-1), kept[1], "in")):
        part_w, part_s = torch.zeros_like(to_w), torch.zeros_like(to_s)
        parts.append(_remembered_backward(grad, x, half(w), half(s), scales, sums, name, keep, part_w, part_s))
        to_w.add_(half(part_w))
        to_s.add_(half(part_s))
    return parts[0].add_(parts[1])


def _add_product(total: Tensor, product: Tensor, factor: Tensor) -> None:
    """Add product o factor, summed over the coordinates where the scale is shared by them."""
    total.add_((product * factor).sum(-1, keepdim=True) if total.shape[-1] == 1 else product * factor)


def _open(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Zero where a coordinate is locked to a token; the value itself is not looked at, so NaN stays behind."""
    return rows if mask is None else torch.where(mask, rows, rows.new_zeros(()))


def _slopes(z: Sequence[Tensor], act: Pointwise, mask: Tensor | None) -> list[Tensor]:
    return [_open(slope, mask) for slope in act.slopes(z)]


def _sum_of_products(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Sum of the products of a layer's matrices; of `left`, the first are theirs."""
    total = left[0].bmm(right[0])
    for a, b in zip(left[1:], right[1:]):
        total.baddbmm_(a, b)
    return total


def _taken(rows: Tensor, weights: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """What the first layer takes in of q or k: all of it, or what is open where a single layer's rows are scheduled."""
    return rows if len(weights) > 1 else _open(rows[..., : weights[0].shape[-2]], mask)


def _upper(width: int, device: torch.device) -> Tensor:
    return torch.ones(width, width, dtype=torch.bool, device=device).triu()
