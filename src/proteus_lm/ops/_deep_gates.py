"""From the gates of a chunk's tokens to the scales of its dual form, and back (spec/deep.md 2.1 and 3.4).

A unit is one chunk of one row and head; U units are worked on at once. Everything comes from one recurrence over the b slots of
a unit, on rows of b + 2 numbers: how much of each token's gradient, of the start momentum and of the start weights is in the
momentum (`momentum_t = eta_t momentum_(t-1) + this token`) and in the weights (`weights_t = (1 - alpha_t) weights_(t-1) +
momentum_t`). It has neither logarithms nor quotients, so gates of 0 and 1 are exact, and so are their gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from proteus_lm.ops._deep_chunk import Scales


class Gates:
    """Gates of U units of b slots, fp32 or fp64, and what follows from them.

    Args:
        theta, alpha, eta: (U, b) values in [0, 1].
        valid: bool (U, b); a slot without a token changes nothing: no write, no decay, no step of the momentum.
        read: "post" reads after the token's own write, "pre" before it.
        keep: keep what `backward` needs.
    """

    def __init__(self, theta: Tensor, alpha: Tensor, eta: Tensor, valid: Tensor, *, read: str, keep: bool) -> None:
        self.theta = theta.where(valid, 0)
        self.decay, self.eta = (1 - alpha).where(valid, 1), eta.where(valid, 1)
        self._counts = valid.to(theta.dtype)
        self._first = 1 if read == "post" else 0  # the row of `history` that token 0 reads
        units, self.slots = theta.shape
        momentum, weights = theta.new_zeros(2, units, self.slots + 2)
        momentum[:, -2] = 1
        weights[:, -1] = 1
        self._momenta = [momentum]
        history = theta.new_empty(self.slots + 1, units, self.slots + 2)  # by slot first: each row is written in one piece
        history[0] = weights
        for decay, eta, counts, slot in self._steps():
            momentum = momentum * eta
            momentum[:, slot] = 1
            torch.mul(history[slot], decay, out=history[slot + 1]).addcmul_(momentum, counts)
            if keep:
                self._momenta.append(momentum)
        self.history, self.momentum = history.transpose(0, 1), momentum  # (U, b + 1, b + 2), (U, b + 2)
        if keep:
            self._to_history = torch.zeros_like(self.history)
            self._to_momentum = torch.zeros_like(self.momentum)
            self._to_theta, self._to_decay, self._to_eta = (torch.zeros_like(self.theta) for _ in range(3))

    def _steps(self) -> list[tuple[Tensor, Tensor, Tensor, int]]:
        columns = (t.t().contiguous()[:, :, None] for t in (self.decay, self.eta, self._counts))
        return [(*step, slot) for slot, step in enumerate(zip(*columns))]

    def _reads(self) -> slice:
        return slice(self._first, self._first + self.slots)

    def scales(self, units: slice, opens: Tensor | None = None, mask: Tensor | None = None) -> Scales:
        """The scales of some units.

        Args:
            opens: int64 (U', w), slot at which each coordinate opens, b where it does not; None where all are open throughout.
            mask: bool (U', b, w), given with `opens`.
        """
        history, momentum, theta, b = self.history[units], self.momentum[units], self.theta[units], self.slots
        mix = history[:, self._reads(), :b] * theta[:, None]
        end_mix, end_momentum_mix = (history[:, -1, :b] * theta)[..., None], (momentum[:, :b] * theta)[..., None]
        if opens is None:
            carry, decay = history[..., b, None], history[..., b + 1, None]
            end_momentum = momentum[:, b, None]
        else:
            decay, carry = (_pick(t, opens) for t in (self._decays(units), self._carries(units)))
            end_momentum = torch.nn.functional.pad(momentum[:, :b] * self.eta[units], (0, 1), value=1).gather(-1, opens)
        return Scales(
            decay[:, self._reads()], carry[:, self._reads()], mix, decay[:, -1], carry[:, -1], end_momentum,
            end_mix, end_momentum_mix, mask,
        )  # fmt: skip

    def _carries(self, units: slice) -> Tensor:
        """(U', b + 1, b + 1): of the start momentum in the weights at each row, for a coordinate that opens at each slot.

        Such momentum has been through the same steps as the gradient of the opening token, and through that token's eta.
        """
        carried = self.history[units, :, : self.slots] * self.eta[units, None]
        return torch.nn.functional.pad(carried, (0, 1))

    def _decays(self, units: slice) -> Tensor:
        """(U', b + 1, b + 1): of the start weights at each row, for a coordinate that opens at each slot."""
        steps = torch.where(self._opened(), self.decay[units, :, None], 1)
        return torch.nn.functional.pad(steps.cumprod(1), (0, 0, 1, 0), value=1)

    def _opened(self) -> Tensor:
        """bool (b, b + 1): whether a coordinate that opens at the slot of the column is open at the slot of the row."""
        slots = torch.arange(self.slots + 1, device=self.theta.device)
        return slots <= slots[:-1, None]

    def collect(self, grad: Scales, units: slice, opens: Tensor | None = None) -> None:
        """Take in the gradients of the scales of some units, as they were asked for."""
        b, reads = self.slots, self._reads()
        theta, history, momentum = self.theta[units], self.history[units], self.momentum[units]
        to_history, to_momentum, to_theta = self._to_history[units], self._to_momentum[units], self._to_theta[units]
        to_history[:, reads, :b].addcmul_(grad.mix, theta[:, None])
        to_theta.add_((grad.mix * history[:, reads, :b]).sum(1))
        for mix, rows, to_rows in (
            (grad.end_mix[..., 0], history[:, -1, :b], to_history[:, -1, :b]),
            (grad.end_momentum_mix[..., 0], momentum[:, :b], to_momentum[:, :b]),
        ):
            to_rows.addcmul_(mix, theta)
            to_theta.addcmul_(mix, rows)
        if opens is None:
            for column, (at_reads, at_end) in {b: (grad.carry, grad.end_carry), b + 1: (grad.decay, grad.end_decay)}.items():
                to_history[:, reads, column].add_(at_reads[..., 0])
                to_history[:, -1, column].add_(at_end[..., 0])
            to_momentum[:, b].add_(grad.end_momentum[..., 0])
        else:
            self._collect_opened(grad, units, opens)

    def _collect_opened(self, grad: Scales, units: slice, opens: Tensor) -> None:
        b, eta = self.slots, self.eta[units]
        chosen = torch.nn.functional.one_hot(opens, b + 1).to(eta.dtype)  # (U', w, b + 1)
        to_carries, to_decays = (
            self._rows_of(at_reads, at_end).bmm(chosen)
            for at_reads, at_end in ((grad.carry, grad.end_carry), (grad.decay, grad.end_decay))
        )
        to_carries = to_carries[..., :b]
        self._to_history[units, :, :b].addcmul_(to_carries, eta[:, None])
        to_ends = grad.end_momentum[:, None].bmm(chosen)[:, 0, :b]
        self._to_momentum[units, :b].addcmul_(to_ends, eta)
        self._to_eta[units].add_((to_carries * self.history[units, :, :b]).sum(1)).addcmul_(to_ends, self.momentum[units, :b])
        # A product over slots, taken apart at slot l: what came before l in the row above, what comes after in the column l + 1.
        decays = self._decays(units)
        before = decays[:, :-1].where(self._opened(), 0)
        after = decays[:, 1:, 1:].tril()
        self._to_decay[units].add_((to_decays[:, 1:].bmm(before.mT) * after).sum(1))

    def _rows_of(self, at_reads: Tensor, at_end: Tensor) -> Tensor:
        """Gradients at the reads and at the end as those of the b + 1 rows they were taken from."""
        rows = torch.nn.functional.pad(at_reads, (0, 0, self._first, 1 - self._first))
        rows[:, -1].add_(at_end)
        return rows

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients to theta, alpha and eta, each (U, b), from all that was collected."""
        to_weights, to_momentum = torch.zeros_like(self._to_momentum), self._to_momentum
        to_decays, to_etas = [], []
        for decay, eta, counts, slot in reversed(self._steps()):
            to_weights = to_weights + self._to_history[:, slot + 1]
            to_momentum = to_momentum.addcmul(to_weights, counts)
            to_decays.append((to_weights * self.history[:, slot]).sum(-1))
            to_etas.append((to_momentum * self._momenta[slot]).sum(-1))
            to_weights, to_momentum = to_weights * decay, to_momentum * eta
        to_decay = self._to_decay + torch.stack(to_decays[::-1], 1)
        return self._to_theta, to_decay.neg_(), self._to_eta + torch.stack(to_etas[::-1], 1)


def _pick(columns: Tensor, opens: Tensor) -> Tensor:
    """(U, b + 1, b + 1) -> (U, b + 1, w): the column of each coordinate's opening slot."""
    return columns.gather(-1, opens[:, None].expand(-1, columns.shape[1], -1))
