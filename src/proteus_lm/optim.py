"""AdamW whose updates are gated by a schedule over training steps (Proteus eq 14-15, spec/deep.md 4.3).

The blocks of a gated parameter lie along one of its dimensions. While a block is locked its gradient is zero before clipping sees
it, its moments stay zero, and (by default) weight decay leaves it alone: it keeps its bits until it opens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor

from proteus_lm.schedule import ActivationSchedule

Gate = tuple[int, ActivationSchedule]


class GatedAdamW(torch.optim.Optimizer):
    """AdamW with decoupled decay (theta <- (1 - lr * weight_decay) theta - lr m^ / (sqrt(v^) + eps)), gated by blocks.

    Args:
        params: parameters or groups, as for `torch.optim.AdamW`.
        masks: gated parameters: parameter -> (dimension, schedule over this optimiser's steps, counted from 0).
        periods: parameter -> C: one update every C steps, with the mean of the C gradients (Hope, eq 17-18); others 1.
        decay_locked: True decays locked coordinates too, as eq 15 is printed; False keeps them (Definition 2).
        bias_correction: "block" counts a coordinate's own updates since it opened; "global" counts all (eq 15 as printed).

    Call `mask_gradients()` before clipping gradients; `step()` calls it too. Its number of steps is in `state_dict()`.

    Raises:
        ValueError: for values out of range, or a gate or period for something that is not a parameter here.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        masks: Mapping[Tensor, Gate] | None = None,
        periods: Mapping[Tensor, int] | None = None,
        decay_locked: bool = False,
        bias_correction: str = "block",
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= b < 1 for b in betas):
            raise ValueError(f"lr {lr}, eps {eps}, weight_decay {weight_decay} must not be negative, betas {betas} in [0, 1)")
        if bias_correction not in ("block", "global"):
            raise ValueError(f"bias_correction is {bias_correction!r}; it must be 'block' or 'global'")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "step": 0})
        self.masks, self.periods = dict(masks or {}), dict(periods or {})
        self.decay_locked, self.bias_correction = decay_locked, bias_correction
        known = {p for group in self.param_groups for p in group["params"]}
        for name, mapping in (("masks", self.masks), ("periods", self.periods)):
            strangers = [tuple(p.shape) for p in mapping if p not in known]
            if strangers:
                raise ValueError(f"{name} names tensors of shape {strangers} that are not among the parameters")
        for p, (dim, schedule) in self.masks.items():
            if not -p.dim() <= dim < p.dim():
                raise ValueError(f"gate along dimension {dim} of a parameter of shape {tuple(p.shape)}")
            schedule.active(p.shape[dim], 0)  # raises when it cannot be cut
        for period in self.periods.values():
            if period < 1:
                raise ValueError(f"a period is {period}; it must be at least 1")

    @property
    def steps(self) -> int:
        """Optimiser steps done; the schedules of masks and periods stand there. Set it to continue a run."""
        return self.param_groups[0]["step"]

    @steps.setter
    def steps(self, value: int) -> None:
        for group in self.param_groups:
            group["step"] = value

    @torch.no_grad()
    def mask_gradients(self) -> None:
        """Set the gradients of locked coordinates to zero, in place, for the step to come."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p in self.masks:
                    dim, schedule = self.masks[p]
                    size = p.shape[dim]
                    width = schedule.active(size, group["step"])
                    p.grad.narrow(dim, width, size - width).zero_()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One optimiser step: parameters whose period ends now are updated, the others collect their gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.mask_gradients()
        for group in self.param_groups:
            self._step_group(group)
            group["step"] += 1
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        params, grads = self._due(group)
        if not params:
            return
        beta1, beta2 = group["betas"]
        first = [self.state[p]["exp_avg"] for p in params]
        second = [self.state[p]["exp_avg_sq"] for p in params]
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        self._decay(group, params)
        roots = torch._foreach_sqrt(second)
        steps, plain = [], []
        for p, m, root in zip(params, first, roots):
            size, correction = self._corrections(group, p)
            if isinstance(size, Tensor):  # the correction differs from block to block
                p.sub_(m.mul(size).div_(root.div_(correction).add_(group["eps"])))
            else:
                plain.append((p, m, root, correction))
                steps.append(-size)
        if plain:
            targets, moments, roots, corrections = (list(x) for x in zip(*plain))
            torch._foreach_div_(roots, corrections)
            torch._foreach_add_(roots, group["eps"])
            torch._foreach_addcdiv_(targets, moments, roots, steps)

    def _due(self, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters to update now, with the gradient to use; the gradients of the others are added up."""
        params, grads = [], []
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise ValueError("GatedAdamW takes dense gradients; use sparse=False in the embedding")
            state, period = self.state[p], self.periods.get(p, 1)
            if not state:
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                if period > 1:
                    state["gradient_sum"] = torch.zeros_like(p)
            grad = p.grad
            if period > 1:
                state["gradient_sum"].add_(grad)
                if (group["step"] + 1) % period:
                    continue
                grad = state["gradient_sum"] / period
                state["gradient_sum"].zero_()
            params.append(p)
            grads.append(grad)
        return params, grads

    def _decay(self, group: dict[str, Any], params: list[Tensor]) -> None:
        if not group["weight_decay"]:
            return
        factor = 1 - group["lr"] * group["weight_decay"]
        gated = [] if self.decay_locked else [p for p in params if p in self.masks]
        kept = set(gated)
        free = [p for p in params if p not in kept]
        if free:
            torch._foreach_mul_(free, factor)
        for p in gated:
            dim, schedule = self.masks[p]
            p.narrow(dim, 0, schedule.active(p.shape[dim], group["step"])).mul_(factor)

    def _corrections(self, group: dict[str, Any], p: Tensor) -> tuple[Any, Any]:
        """lr / (1 - beta1^s) and sqrt(1 - beta2^s): numbers, or tensors along the gated dimension where blocks differ in s."""
        lr, (beta1, beta2), period = group["lr"], group["betas"], self.periods.get(p, 1)
        updates = (group["step"] + 1) // period
        if p not in self.masks or self.bias_correction == "global":
            return lr / (1 - beta1**updates), (1 - beta2**updates) ** 0.5
        dim, schedule = self.masks[p]
        sizes, numerator, root = [], [], []
        for block, (start, end) in enumerate(schedule.block_bounds(p.shape[dim])):
            opened = max(1, updates - schedule.unlock_position(block) // period)  # a locked block's 0 / (0 + eps) is 0 anyway
            sizes.append(end - start)
            numerator.append(lr / (1 - beta1**opened))
            root.append((1 - beta2**opened) ** 0.5)
        if schedule.blocks == 1:
            return numerator[0], root[0]
        shape = [1] * p.dim()
        shape[dim] = -1
        repeats = torch.tensor(sizes)
        both = torch.tensor([numerator, root], dtype=torch.float64).repeat_interleave(repeats, 1).to(p.device, p.dtype)
        return both[0].view(shape), both[1].view(shape)
