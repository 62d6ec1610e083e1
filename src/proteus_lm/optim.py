"""AdamW whose updates are gated by a schedule over training steps (Proteus eq 14-15, spec/deep.md 4.3).

The blocks of a gated parameter lie along one of its dimensions. While a block is locked its gradient is zero before clipping sees
it, its moments stay zero, and (by default) weight decay leaves it alone: it keeps its bits until it opens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn import Parameter

from proteus_lm.schedule import ActivationSchedule

Gate = tuple[int, ActivationSchedule]
Correction = tuple[float, float] | tuple[Tensor, Tensor]


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
        masks: Mapping[Parameter, Gate] | Mapping[Tensor, Gate] | None = None,
        periods: Mapping[Parameter, int] | Mapping[Tensor, int] | None = None,
        decay_locked: bool = False,
        bias_correction: str = "block",
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= b < 1 for b in betas):
            raise ValueError(f"lr {lr}, eps {eps}, weight_decay {weight_decay} must not be negative, betas {betas} in [0, 1)")
        if bias_correction not in ("block", "global"):
            raise ValueError(f"bias_correction is {bias_correction!r}; it must be 'block' or 'global'")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "step": 0})
        self.masks: dict[Any, Gate] = dict(masks or {})
        self.periods: dict[Any, int] = dict(periods or {})
        self.decay_locked, self.bias_correction = decay_locked, bias_correction
        if self.masks and not eps:
            raise ValueError("eps is 0 with masks: a locked coordinate would be moved by 0 / 0; use an eps above 0")
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
        locked = []
        for group in self.param_groups if self.masks else ():
            for p in group["params"]:
                if p.grad is not None:
                    dim, width = self._open(group, p)
                    if width is not None and width < p.shape[dim]:
                        locked.append(p.grad.narrow(dim, width, p.shape[dim] - width))
        if locked:
            torch._foreach_zero_(locked)

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
        plain, steps, divisors = [], [], []
        blocked, factors, terms = [], [], []  # where the correction differs from block to block
        for root, (a, b) in zip(roots, self._corrections(group, params)):
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                blocked.append(root)
                factors.append(a)
                terms.append(b)
                steps.append(-group["lr"])
            else:
                plain.append(root)
                divisors.append(b)
                steps.append(-group["lr"] / a)
        if plain:
            torch._foreach_div_(plain, divisors)
            torch._foreach_add_(plain, group["eps"])
        if blocked:  # two passes: on a CPU four times as fast as addcmul, whose two broadcast arguments stop vectorisation
            torch._foreach_mul_(blocked, factors)
            torch._foreach_add_(blocked, terms)
        torch._foreach_addcdiv_(params, first, roots, steps)

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
        """Shrink what decays: of a gated parameter the open coordinates."""
        if not group["weight_decay"]:
            return
        factor, whole, parts = 1 - group["lr"] * group["weight_decay"], [], []
        for p in params:
            dim, width = self._open(group, p) if not self.decay_locked else (0, None)
            if width is None or width == p.shape[dim]:
                whole.append(p)
            else:
                parts.append(p.narrow(dim, 0, width))
        for tensors in (whole, parts):
            if tensors:
                torch._foreach_mul_(tensors, factor)

    def _open(self, group: dict[str, Any], p: Tensor) -> tuple[int, int | None]:
        """The gated dimension of a parameter and its open length; None where nothing is gated."""
        if p not in self.masks:
            return 0, None
        dim, schedule = self.masks[p]
        return dim, _width(schedule, p.shape[dim], group["step"])

    def _corrections(self, group: dict[str, Any], params: list[Tensor]) -> Iterator[Correction]:
        """Of each parameter: numbers (1 - beta1^s, sqrt(1 - beta2^s)), or where blocks differ in s tensors (a, b) along its gated
        dimension with  lr m / (1 - beta1^s) / (sqrt(v) / sqrt(1 - beta2^s) + eps) = lr m / (a sqrt(v) + b).
        """
        known: dict[Any, Correction] = {}  # parameters of one size and gate share theirs
        for p in params:
            period = self.periods.get(p, 1)
            gate = self.masks.get(p) if self.bias_correction == "block" else None
            key = (period, gate, gate and (p.shape, p.device, p.dtype))
            if key not in known:
                known[key] = self._correction(group, period, gate, p)
            yield known[key]

    def _correction(self, group: dict[str, Any], period: int, gate: Gate | None, p: Tensor) -> Correction:
        (beta1, beta2), updates = group["betas"], (group["step"] + 1) // period
        if gate is None:
            return 1 - beta1**updates, (1 - beta2**updates) ** 0.5
        dim, schedule = gate
        # Each block's own updates; of a locked one, whose moments are 0, any number will do: that of the newest open block.
        count = schedule.active_blocks(group["step"])
        own = [max(1, updates - schedule.unlock_position(min(e, count - 1)) // period) for e in range(schedule.blocks)]
        both = [(1 - beta1**s, (1 - beta2**s) ** 0.5) for s in own]
        if len(set(both)) == 1:
            return both[0]
        sizes = torch.tensor([end - start for start, end in schedule.block_bounds(p.shape[dim])])
        values = torch.tensor([[x / y for x, y in both], [x * group["eps"] for x, _ in both]], dtype=torch.float64)
        shape = [1] * p.dim()
        shape[dim] = -1
        a, b = (t.view(shape) for t in values.repeat_interleave(sizes, 1).to(p.device, p.dtype).unbind())
        if p.is_cuda:  # of the parameter's own layout, so that one kernel takes many parameters
            a, b = (torch.empty_like(p).copy_(t) for t in (a, b))
        return a, b


@lru_cache(maxsize=1024)
def _width(schedule: ActivationSchedule, size: int, step: int) -> int:
    """Open coordinates; many parameters ask the same question each step."""
    return schedule.active(size, step)
