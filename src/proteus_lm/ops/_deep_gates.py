"""From the gates of a chunk's tokens to the scales of its dual form, and back (spec/deep.md 2.1 and 3.4).

A unit is one chunk of one row and head; U units are worked on at once. Everything comes from one recurrence over the b slots of
a unit, on rows of b + 2 numbers: how much of each token's gradient, of the start momentum and of the start weights is in the
momentum (`momentum_t = eta_t momentum_(t-1) + this token`) and in the weights (`weights_t = (1 - alpha_t) weights_(t-1) +
momentum_t`). It has neither logarithms nor quotients, so gates of 0 and 1 are exact, and so are their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proteus_lm.ops._deep_block import BlockScales
from proteus_lm.ops._deep_chunk import Scales


class Gates:
    """Gates of U units of b slots, fp32 or fp64, and what follows from them.

    Args:
        theta, alpha, eta: (U, b) values in [0, 1].
        valid: bool (U, b); a slot without a token changes nothing: no write, no decay, no step of the momentum.
        read: "post" reads after the token's own write, "pre" before it.
        keep: keep what `backward` needs.
        made: `made` of the same gates with `keep`, where it need not be worked out again.
    """

    def __init__(
        self,
        theta: Tensor,
        alpha: Tensor,
        eta: Tensor,
        valid: Tensor,
        *,
        read: str,
        keep: bool,
        made: Sequence[Tensor] = (),
    ) -> None:
        self.theta = theta.where(valid, 0)
        self.decay, self.eta = (1 - alpha).where(valid, 1), eta.where(valid, 1)
        self._counts = valid.to(theta.dtype)
        self._first = 1 if read == "post" else 0  # the row of `history` that token 0 reads
        b = self.slots = theta.shape[1]
        # By slot first, (b + 1, U, b + 2): each row is written in one piece. Columns: each token's gradient, then the weights and
        # the momentum of the start.
        self.made = made or self._recur(keep)
        self._history, self._momenta = self.made
        self.history, self.momentum = self._history.transpose(0, 1), self._momenta[-1]
        last = self._history[-1]
        self._step = torch.stack([last[:, b:], self.momentum[:, b:]], 1)
        self._ends = torch.stack([last[:, :b], self.momentum[:, :b]], -1)
        self._less, self._scaled_ends = self.theta.neg()[:, None], self._ends * self.theta[..., None]

    def begin_backward(self) -> None:
        """Make room for the gradients to collect."""
        self._to_history, self._to_momentum = torch.zeros_like(self._history), torch.zeros_like(self.momentum)
        self._to_theta, self._to_decay, self._to_eta = (torch.zeros_like(self.theta) for _ in range(3))
        self._to_reads, self._to_step, self._to_ends = (torch.zeros_like(t) for t in (self._ends, self._step, self._ends))

    def _recur(self, keep: bool) -> tuple[Tensor, Tensor]:
        """What is in the weights and in the momentum before each slot and at the end; of the momentum, only at the end without
        `keep`."""
        b, units = self.slots, len(self.theta)
        history, momenta = self.theta.new_empty(b + 1, units, b + 2), self.theta.new_empty(b + 1 if keep else 1, units, b + 2)
        history[0], momenta[0] = 0, 0
        history[0, :, b], momenta[0, :, b + 1] = 1, 1
        tokens = torch.eye(b, b + 2, dtype=history.dtype, device=history.device)
        rows = momenta.unbind() if keep else [momenta[0]] * (b + 1)
        for (decay, eta, counts), token, before, after, now, then in zip(
            self._steps(), tokens.unbind(), history[:-1].unbind(), history[1:].unbind(), rows, rows[1:]
        ):
            torch.addcmul(token, now, eta, out=then)
            torch.mul(before, decay, out=after).addcmul_(then, counts)
        # What is left of old tokens may be so little (below 1e-31 in fp32) that a processor takes many times as long for products
        # with it. Nothing is negative here.
        tiny = torch.finfo(history.dtype).tiny / torch.finfo(history.dtype).eps
        return torch.threshold_(history, tiny, 0), torch.threshold_(momenta, tiny, 0)

    def _steps(self) -> list[tuple[Tensor, ...]]:
        """decay, eta and count of each slot, (U, 1) each."""
        columns = torch.stack([self.decay, self.eta, self._counts]).transpose(1, 2).contiguous()[..., None]
        return list(zip(*(t.unbind() for t in columns)))

    def _reads(self) -> slice:
        return slice(self._first, self._first + self.slots)

    def block_scales(self, units: slice, advanced: int) -> BlockScales:
        """The scales of some units, all open throughout, of which those behind the first `advanced` end as they began."""
        b, seen, size = self.slots, self.history[units, self._reads()], units.stop - units.start
        less = torch.mul(seen[..., :b], self._less[units], out=seen.new_empty(size, b, b))
        step, ends = self._step[units], self._scaled_ends[units]
        if advanced < size:
            step, ends = step.clone(), ends.clone()
            step[advanced:] = torch.eye(2, dtype=step.dtype, device=step.device)
            ends[advanced:] = 0
        return BlockScales(seen[..., b:], less, step, ends)

    def block_totals(self, units: slice) -> BlockScales:
        """Where to put the gradients of `block_scales`: zeros, but for `less`, which `collect_block` asks for."""
        less = self.theta.new_empty(units.stop - units.start, self.slots, self.slots)
        return BlockScales(self._to_reads[units], less, self._to_step[units], self._to_ends[units])

    def collect_block(self, grad: BlockScales, units: slice, advanced: int) -> None:
        """Take in what was put into `block_totals`."""
        rows, b = self._reads(), self.slots
        self._to_theta[units].sub_((grad.less * self.history[units, rows, :b]).sum(1))
        self._to_history[rows, units, :b].addcmul_(grad.less.transpose(0, 1), self._less[units, 0])
        if advanced < len(grad.step):
            grad.step[advanced:] = 0
            grad.ends[advanced:] = 0

    def _collect_reads_and_ends(self) -> None:
        """Pass on the gradients of reads, steps and ends that were put into `block_totals`."""
        b, to_last = self.slots, self._to_history[-1]
        self._to_history[self._reads(), :, b:].add_(self._to_reads.transpose(0, 1))
        self._to_theta.add_((self._to_ends * self._ends).sum(-1))
        for column, target in enumerate((to_last, self._to_momentum)):
            target[:, :b].addcmul_(self._to_ends[..., column], self.theta)
            target[:, b:].add_(self._to_step[:, column])

    def scales(self, units: slice, opens: Tensor, mask: Tensor | None) -> Scales:
        """The scales of some units, some of whose coordinates open inside.

        Args:
            opens: int64 (U', w), slot at which each coordinate opens, b where it does not.
            mask: bool (U', b, w), whether it is open to each token; None: all are, and w is 1.
        """
        history, momentum, theta, b = self.history[units], self.momentum[units], self.theta[units], self.slots
        mix = history[:, self._reads(), :b] * theta[:, None]
        end_mix, end_momentum_mix = (history[:, -1, :b] * theta)[..., None], (momentum[:, :b] * theta)[..., None]
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

    def collect(self, grad: Scales, units: slice, opens: Tensor) -> None:
        """Take in the gradients of what `scales` gave."""
        b, reads, eta = self.slots, self._reads(), self.eta[units]
        theta, history, momentum = self.theta[units], self.history[units], self.momentum[units]
        to_history, to_momentum = self._to_history.transpose(0, 1)[units], self._to_momentum[units]
        to_theta = self._to_theta[units]
        to_history[:, reads, :b].addcmul_(grad.mix, theta[:, None])
        to_theta.add_((grad.mix * history[:, reads, :b]).sum(1))
        for mix, rows, to_rows in (
            (grad.end_mix[..., 0], history[:, -1, :b], to_history[:, -1, :b]),
            (grad.end_momentum_mix[..., 0], momentum[:, :b], to_momentum[:, :b]),
        ):
            to_rows.addcmul_(mix, theta)
            to_theta.addcmul_(mix, rows)
        chosen = torch.nn.functional.one_hot(opens, b + 1).to(eta.dtype)  # (U', w, b + 1)
        to_carries, to_decays = (
            self._rows_of(at_reads, at_end).bmm(chosen)
            for at_reads, at_end in ((grad.carry, grad.end_carry), (grad.decay, grad.end_decay))
        )
        to_carries = to_carries[..., :b]
        to_history[..., :b].addcmul_(to_carries, eta[:, None])
        to_ends = grad.end_momentum[:, None].bmm(chosen)[:, 0, :b]
        to_momentum[:, :b].addcmul_(to_ends, eta)
        self._to_eta[units].add_((to_carries * history[:, :, :b]).sum(1)).addcmul_(to_ends, momentum[:, :b])
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
        self._collect_reads_and_ends()
        to_weights, to_momentum = self._to_history.unbind(), self._to_momentum
        to_decay, to_eta = to_momentum.new_empty(2, self.slots, len(self.theta))
        product = torch.empty_like(to_momentum)
        for slot, (decay, eta, counts) in reversed(list(enumerate(self._steps()))):
            after = to_weights[slot + 1]  # complete: rows before it get their part below
            to_momentum.addcmul_(after, counts)
            torch.sum(torch.mul(after, self._history[slot], out=product), -1, out=to_decay[slot])
            torch.sum(torch.mul(to_momentum, self._momenta[slot], out=product), -1, out=to_eta[slot])
            to_weights[slot].addcmul_(after, decay)
            to_momentum.mul_(eta)
        return self._to_theta, self._to_decay.add_(to_decay.t()).neg_(), self._to_eta.add_(to_eta.t())


def _pick(columns: Tensor, opens: Tensor) -> Tensor:
    """(U, b + 1, b + 1) -> (U, b + 1, w): the column of each coordinate's opening slot."""
    return columns.gather(-1, opens[:, None].expand(-1, columns.shape[1], -1))
