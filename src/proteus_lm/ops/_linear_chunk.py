"""The chunk form of every linear rule, and its gradient: one group of tiles at a time (see `_linear_tiles`).

In a tile of C tokens with state S before it, G the running sum of log decays in the tile, X what is written (spec/linear.md 1):

    O  = (e^G Q) S + (Q K^T * R) X        S' = e^{G_C} S + (R_C K)^T X        R[t, i]: what is left at t of the write of token i

Hebbian rules write X = V with R[t, i] = e^{G_t - G_i} (retention). With a window of c weights R[t, i] is the sum over write times
i + j in the tile of e^{G_t - G_{i+j}} gamma_{i+j, j}, and i runs from c - 1 tokens before the tile. Delta rules write
X = (I + A)^{-1} beta (V - e^{G'} P S) with A = tril(beta P K^T * e^{G'_t - G_i}, -1); G' is G for an error against the decayed
state, else G of the token before. A read before the write (`pre`) takes e^G and R of the token before, 1 and 0 at the first. All
but the recurrence over S is done for the tiles of a group in one batch. Only differences of G are exponentiated, with what is not
causal left out before; G is summed in fp64, so that a strong decay early in a tile costs later ones no digits.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

# e to this is 0 in fp64, so that nothing changes, and a gate of exactly 0 (log decay -inf) has differences too.
_NOTHING_LEFT = -1000.0


class Tiles(NamedTuple):
    """A group's tokens, as n tiles of M = rows * heads matrices, in the type computed in; only the open coordinates.

    q, p: (n, M, C, K); p None: k.  k: (n, M, c - 1 + C, K).  v: (n, M, c - 1 + C, V).  g, beta: (n, M, C).  gamma: (n, M, C, c).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None = None
    p: Tensor | None = None
    gamma: Tensor | None = None


def _later(x: Tensor, first: float) -> Tensor:
    """x (M, C, ...) of the token before at each token, `first` at the first."""
    return torch.cat((torch.full_like(x[:, :1], first), x[:, :-1]), 1)


def _sooner(x: Tensor) -> Tensor:
    """The gradient of `_later`: x (M, C, ...) of the token behind at each token, 0 at the last."""
    return torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), 1)


class Hebbian:
    """Rules that write their values as they are: retention and sliding-window linear attention.

    `pre`: a token reads the state before its own write.
    """

    def __init__(self, tiles: Tiles, pre: bool) -> None:
        self.count, self.matrices, self.length = tiles.g.shape
        self.q, self.k, self.v = (x.flatten(0, 1) for x in (tiles.q, tiles.k, tiles.v))
        self.gamma = None if tiles.gamma is None else tiles.gamma.flatten(0, 1)
        total = tiles.g.flatten(0, 1).double().clamp(min=_NOTHING_LEFT).cumsum(-1)
        self.decay = (total[:, :, None] - total[:, None, :]).to(tiles.g.dtype).tril_().exp_().tril_()  # e^{G_t - G_j}
        self.since = total.exp().to(tiles.g.dtype)  # e^{G_t}, from before the tile
        self.left = self._left()
        self.pre = pre
        self.read_left = _later(self.left, 0.0) if pre else self.left  # what a read at t finds
        self.read_since = _later(self.since, 1.0) if pre else self.since
        self.kept = self.k * self.left[:, -1, :, None]
        self.written = self.v

    @cached_property
    def product(self) -> Tensor:
        return self.q @ self.k.mT

    @cached_property
    def scores(self) -> Tensor:
        return (self.q @ self.k.mT).mul_(self.read_left) if self.gamma is None else self.product * self.read_left

    @cached_property
    def reading(self) -> Tensor:
        return self.q * self.read_since[..., None]

    def _left(self) -> Tensor:
        if self.gamma is None:
            return self.decay
        window = self.gamma.shape[-1]
        left = self.decay.new_zeros(*self.decay.shape[:2], self.length + window - 1)
        for j in range(window):  # column i is token i - (c - 1), which token i + j - (c - 1) writes again
            left[..., window - 1 - j : window - 1 - j + self.length].addcmul_(self.decay, self.gamma[:, None, :, j])
        return left

    def _tilewise(self, x: Tensor) -> Tensor:
        return x.view(self.count, self.matrices, *x.shape[1:])

    def scan(self, state: Tensor) -> Tensor:
        """Carry the state (M, K, V) through the tiles; returns the one behind the last."""
        self.states = state.new_empty(self.count + 1, *state.shape)
        self.states[0] = state
        self._advance(self._tilewise(self.since[:, -1, None, None]))
        return self.states[-1]

    def _advance(self, decay: Tensor) -> None:
        writes = self._tilewise(self.kept.mT @ self.written)
        states = self.states.unbind()
        for before, after, write, left in zip(states, states[1:], writes.unbind(), decay.unbind()):
            torch.addcmul(write, before, left, out=after)

    def read(self, scale: float) -> Tensor:
        """Outputs (n, M, C, V) times `scale`, after `scan`."""
        out = torch.bmm(self.reading, self.states[:-1].flatten(0, 1))
        return self._tilewise(out.baddbmm_(self.scores, self.written, beta=scale, alpha=scale))

    def backward(self, d_out: Tensor, d_state: Tensor) -> tuple[Tensor, Tiles]:
        """Gradients with respect to the state before the first tile and to the tiles, after `scan`.

        Args:
            d_out: (n, M, C, V).  d_state: (M, K, V), of the state behind the last tile.
        """
        d_out = d_out.flatten(0, 1)
        d_written = self.scores.mT @ d_out
        d_states = d_out.new_empty(self.count + 1, *d_state.shape)
        d_states[-1] = d_state
        through = self._tilewise(self.reading.mT @ d_out)  # reaches the state by the tile's own reads
        self._retreat(self._tilewise(self.since[:, -1, None, None]), through, d_states, d_written)
        before, after = self.states[:-1].flatten(0, 1), d_states[1:].flatten(0, 1)

        d_scores = d_out @ self.written.mT
        d_kept = self.written @ after.mT
        d_reading = d_out @ before.mT
        d_left, d_gamma = self._backward_left(d_scores, d_kept)  # with respect to G_t - G_j
        d_product = d_scores.mul_(self.read_left)
        d_q = (d_reading * self.read_since[..., None]).baddbmm_(d_product, self.k)
        d_k = (d_kept * self.left[:, -1, :, None]).baddbmm_(d_product.mT, self.q)
        d_total = self._of_reads(d_reading.mul_(self.reading).sum(-1))
        d_total[:, -1] += (before * after).sum((-1, -2)) * self.since[:, -1]
        grads = Tiles(d_q, d_k, d_written, d_total, gamma=d_gamma)
        grads = self._backward_rule(grads, d_left, before)
        d_total = grads.g + d_left.sum(-1) - d_left.sum(-2)
        grads = grads._replace(g=d_total.flip(-1).cumsum(-1).flip(-1))
        return d_states[0], Tiles._make(None if x is None else self._tilewise(x) for x in grads)

    def _retreat(self, decay: Tensor, through: Tensor, d_states: Tensor, d_written: Tensor) -> None:
        states = d_states.unbind()
        for before, after, read, left in reversed(list(zip(states, states[1:], through.unbind(), decay.unbind()))):
            torch.addcmul(read, after, left, out=before)
        d_written.baddbmm_(self.kept, d_states[1:].flatten(0, 1))

    def _of_reads(self, x: Tensor) -> Tensor:
        """Gradients of what reads found (M, C, ...), at the token whose write it was behind."""
        return _sooner(x) if self.pre else x

    def _backward_left(self, d_scores: Tensor, d_kept: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.gamma is None:
            d_left = self._of_reads(d_scores * self.scores)
            d_left[:, -1] += (d_kept * self.kept).sum(-1)
            return d_left, None
        d_left = self._of_reads(d_scores * self.product)
        d_left[:, -1] += (d_kept * self.k).sum(-1)
        window = self.gamma.shape[-1]
        d_difference, d_gamma = torch.zeros_like(self.decay), torch.empty_like(self.gamma)
        for j in range(window):
            part = d_left[..., window - 1 - j : window - 1 - j + self.length] * self.decay
            d_gamma[..., j] = part.sum(-2)
            d_difference.addcmul_(part, self.gamma[:, None, :, j])
        return d_difference, d_gamma

    def _backward_rule(self, grads: Tiles, d_left: Tensor, before: Tensor) -> Tiles:
        return grads


class Delta(Hebbian):
    """Rules that write the error of a read: the delta rule, its gated form (`decayed`) and Comba."""

    def __init__(self, tiles: Tiles, pre: bool, decayed: bool) -> None:
        super().__init__(tiles, pre)
        assert tiles.beta is not None
        self.beta, self.decayed = tiles.beta.flatten(0, 1), decayed
        self.p = self.k if tiles.p is None else tiles.p.flatten(0, 1)
        self.error_since = self.since if decayed else _later(self.since, 1.0)
        self.overlap = self._decay_errors(self.p @ self.k.mT)  # A without beta
        identity = torch.eye(self.length, dtype=self.q.dtype, device=self.q.device).expand_as(self.overlap)
        system = self.overlap * self.beta[..., None]
        self.inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
        self.error_reading = self.p * self.error_since[..., None]
        weighted = self.inverse * self.beta[:, None, :]
        self.written = weighted @ self.v  # if the state before the tile were 0; `_advance` takes off what it holds
        self.erase = weighted @ self.error_reading

    def _decay_errors(self, x: Tensor) -> Tensor:
        """Multiply (.., C, C) in place by what the state read at t for the error has left of the write of token i < t."""
        if self.decayed:
            return x.mul_(self.decay).tril_(-1)
        x[:, 0] = 0
        x[:, 1:] *= self.decay[:, :-1]
        return x

    def _advance(self, decay: Tensor) -> None:
        states = self.states.unbind()
        tiles = (self._tilewise(x).unbind() for x in (self.written, self.erase, self.kept))
        for before, after, left, written, erase, kept in zip(states, states[1:], decay.unbind(), *tiles):
            written.baddbmm_(erase, before, alpha=-1)
            torch.mul(before, left, out=after).baddbmm_(kept.mT, written)

    def _retreat(self, decay: Tensor, through: Tensor, d_states: Tensor, d_written: Tensor) -> None:
        states = d_states.unbind()
        tiles = (self._tilewise(x).unbind() for x in (d_written, self.erase, self.kept))
        steps = zip(states, states[1:], through.unbind(), decay.unbind(), *tiles)
        for before, after, read, left, written, erase, kept in reversed(list(steps)):
            written.baddbmm_(kept, after)
            torch.addcmul(read, after, left, out=before).baddbmm_(erase.mT, written, alpha=-1)

    def _backward_rule(self, grads: Tiles, d_left: Tensor, before: Tensor) -> Tiles:
        """From the gradient of X to those of V, P, K, beta and G; `grads.v` is the gradient of X."""
        beta = self.beta[..., None]
        d_right = self.inverse.mT @ grads.v  # of beta (V - e^{G'} P S)
        negative = d_right.neg()
        d_system = negative @ self.written.mT
        d_error_reading = negative @ before.mT
        by_reading = (d_error_reading * self.error_reading).sum(-1)
        by_system = d_system * self.overlap
        d_beta = (d_right * self.v).sum(-1) + by_reading + by_system.sum(-1)
        by_reading, by_system = by_reading * self.beta, by_system.mul_(beta)
        if self.decayed:
            grads.g.add_(by_reading)
            d_left.add_(by_system)
        else:
            grads.g[:, :-1] += by_reading[:, 1:]
            d_left[:, :-1] += by_system[:, 1:]
        d_product = self._decay_errors(d_system).mul_(beta)
        d_p = d_error_reading.mul_(beta * self.error_since[..., None]).baddbmm_(d_product, self.k)
        grads.k.baddbmm_(d_product.mT, self.p)
        if self.p is self.k:
            grads.k.add_(d_p)
        return grads._replace(v=d_right.mul_(beta), p=None if self.p is self.k else d_p, beta=d_beta)
