"""AdamW whose updates are gated by a schedule over training steps (Proteus eq 14-15, spec/deep.md 4.3).

The blocks of a gated parameter lie along one of its dimensions. While a block is locked its gradient is zero before clipping sees
it, its moments stay zero, and (by default) weight decay leaves it alone: it keeps its bits until it opens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn import Parameter

from proteus_lm.schedule import ActivationSchedule

Gate = tuple[int, ActivationSchedule]
Correction = tuple[float, float] | tuple[Tensor, Tensor]
BATCH = 1 << 17
"""Numbers of parameters updated at a time on a CPU."""
_WORDS = {4: torch.int32, 8: torch.int64}  # bytes of a number -> the integer of that size


class GatedAdamW(torch.optim.Optimizer):
    """AdamW with decoupled decay (theta <- (1 - lr * weight_decay) theta - lr m^ / (sqrt(v^) + eps)), gated by blocks.

    Args:
        params: parameters or groups, as for `torch.optim.AdamW`.
        masks: gated parameters: parameter -> (dimension, schedule over this optimiser's steps, counted from 0).
        periods: parameter -> C: one update every C steps, with the mean of the C gradients (Hope, eq 17-18); others 1.
        decay_locked: True decays locked coordinates too, as eq 15 is printed; False keeps them (Definition 2).
        bias_correction: "block" counts a coordinate's own updates since it opened, of a parameter with no gradient at some steps
            (an expert that was not called, a layer trained later) those that it had; "global" counts all (eq 15 as printed).

    Call `mask_gradients()` before clipping gradients; `step()` calls it too. Its number of steps is in `state_dict()`.

    A step is some ten foreach calls over all parameters of a dtype, so that it costs what `torch.optim.AdamW(foreach=True)` costs.

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
        self._sorted: dict[tuple[int, ...], list[list[_Cohort]]] = {}  # ids of a group's parameters -> `_lots`

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
        for group in self.param_groups if self.masks else ():
            for lot in self._lots(group):
                slices, words, masks = [], [], []
                for cohort in lot:
                    width = cohort.width(group["step"])
                    if width is None:
                        continue
                    grads = [p.grad for p in cohort.params if p.grad is not None]
                    if grads and _whole(grads[0]):
                        word = _WORDS[grads[0].element_size()]
                        words += [grad.view(word) for grad in grads]
                        masks += [cohort.mask(grads[0], word, width)] * len(grads)
                    else:
                        slices += [grad.narrow(cohort.dim, width, cohort.size - width) for grad in grads]
                if slices:
                    torch._foreach_zero_(slices)
                if words:  # of the bits, for NaN * 0 is NaN
                    torch._foreach_mul_(words, masks)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One optimiser step: parameters whose period ends now are updated, the others collect their gradient.

        Raises:
            ValueError: for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.mask_gradients()
        for group in self.param_groups:
            for lot in self._lots(group):
                self._step_lot(group, lot)
            group["step"] += 1
        return loss

    def _lots(self, group: dict[str, Any]) -> list[list[_Cohort]]:
        """The cohorts of a group, those of one device and dtype together: what one foreach kernel takes."""
        key = tuple(map(id, group["params"]))
        if key not in self._sorted:
            lots: dict[Any, dict[Any, _Cohort]] = {}
            for p in group["params"]:
                gate, period = self.masks.get(p), self.periods.get(p, 1)
                cohorts = lots.setdefault((p.device, p.dtype), {})
                kind = (period, gate, gate and p.shape)
                if kind not in cohorts:
                    cohorts[kind] = _Cohort(period, gate, p)
                cohorts[kind].params.append(p)
            self._sorted[key] = [list(cohorts.values()) for cohorts in lots.values()]
        return self._sorted[key]

    def _step_lot(self, group: dict[str, Any], lot: list[_Cohort]) -> None:
        due, sums = self._due(group, lot)
        for batch in _batches(due):
            self._update(group, batch)
        if sums:
            torch._foreach_zero_(sums)

    def _update(self, group: dict[str, Any], batch: _Due) -> None:
        beta1, beta2 = group["betas"]
        params = [p for _, members, _ in batch for p in members]
        grads = [grad for _, _, own in batch for grad in own]
        states = [self.state[p] for p in params]
        first, second = ([state[moment] for state in states] for moment in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        self._decay(group, batch)
        roots = list(torch._foreach_sqrt(second))
        rates = self._correct(group, batch, roots)
        torch._foreach_addcdiv_(params, first, roots, rates)

    def _due(self, group: dict[str, Any], lot: list[_Cohort]) -> tuple[_Due, list[Tensor]]:
        """Parameters to update now with their gradients; those of the others are added up.

        Second: which of these gradients are sums over a period (their means by now), to be zeroed after use.
        """
        due: _Due = []
        sums, news, ended, periods = [], [], [], []
        for cohort in lot:
            ends = not (group["step"] + 1) % cohort.period
            members = [p for p in cohort.params if p.grad is not None]
            if ends and len(members) < len(cohort.params):
                for p in cohort.params:
                    if p.grad is None and p in self.state:
                        self.state[p]["missed"] = self.state[p].get("missed", 0) + 1
            if not members:
                continue
            own: list[Any] = [p.grad for p in members]
            for p in members:
                if not self.state[p]:
                    self._start(p, cohort.period, group["step"] // cohort.period)
            if cohort.period > 1:
                news += own
                own = [self.state[p]["gradient_sum"] for p in members]
                sums += own
                if ends:
                    ended += own
                    periods += [cohort.period] * len(own)
            if ends:
                due.append((cohort, members, own))
        if sums:
            torch._foreach_add_(sums, news)
        if ended:
            torch._foreach_div_(ended, periods)
        return due, ended

    def _start(self, p: Tensor, period: int, missed: int) -> None:
        """The state of a parameter that has its first gradient, after so many updates without it."""
        if p.grad is not None and p.grad.is_sparse:
            raise ValueError("GatedAdamW takes dense gradients; use sparse=False in the embedding")
        names = ("exp_avg", "exp_avg_sq", "gradient_sum") if period > 1 else ("exp_avg", "exp_avg_sq")
        self.state[p].update({name: torch.zeros_like(p) for name in names})
        if missed:
            self.state[p]["missed"] = missed

    def _decay(self, group: dict[str, Any], batch: _Due) -> None:
        """Shrink what decays: of a gated parameter the open coordinates."""
        if not group["weight_decay"]:
            return
        factor, scaled, partly, factors = 1 - group["lr"] * group["weight_decay"], [], [], []
        for cohort, members, _ in batch:
            width = None if self.decay_locked else cohort.width(group["step"])
            if width is None:
                scaled += members
            elif _whole(members[0]):
                partly += members
                factors += [cohort.factor(members[0], factor, width)] * len(members)
            else:
                scaled += [p.narrow(cohort.dim, 0, width) for p in members]
        if scaled:
            torch._foreach_mul_(scaled, factor)
        if partly:
            torch._foreach_mul_(partly, factors)

    def _correct(self, group: dict[str, Any], batch: _Due, roots: list[Tensor]) -> list[float]:
        """Turn sqrt(v), in place, into what m is to be divided by; returns what the quotients are to be multiplied by."""
        plain, divisors, rates = [], [], []
        blocked, factors, terms = [], [], []  # where the correction differs from block to block
        rest = iter(roots)
        about = (group["step"], group["betas"], group["eps"], self.bias_correction)
        for cohort, missed, members in self._alike(batch):
            own = [next(rest) for _ in members]
            like, name = members[0], "late correction" if missed else "correction"
            a, b = cohort.kept(name, (*about, missed, like.device), self._correction, group, cohort, like, missed)
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                blocked += own
                factors += [a] * len(own)
                terms += [b] * len(own)
                rates += [-group["lr"]] * len(own)
            else:
                plain += own
                divisors += [b] * len(own)
                rates += [-group["lr"] / a] * len(own)
        if plain:
            torch._foreach_div_(plain, divisors)
            torch._foreach_add_(plain, group["eps"])
        if blocked:  # two passes: on a CPU four times as fast as addcmul, whose two broadcast arguments stop vectorisation
            torch._foreach_mul_(blocked, factors)
            torch._foreach_add_(blocked, terms)
        return rates

    def _alike(self, batch: _Due) -> Iterator[tuple[_Cohort, int, list[Tensor]]]:
        """Cohort, updates missed, and parameters in order that agree in both."""
        for cohort, members, _ in batch:
            for missed, some in groupby(members, lambda p: self.state[p].get("missed", 0)):
                yield cohort, missed if self.bias_correction == "block" else 0, list(some)

    def _correction(self, group: dict[str, Any], cohort: _Cohort, like: Tensor, missed: int) -> Correction:
        """Numbers (1 - beta1^s, sqrt(1 - beta2^s)), or where blocks differ in s tensors (a, b) along the gated dimension with
        lr m / (1 - beta1^s) / (sqrt(v) / sqrt(1 - beta2^s) + eps) = lr m / (a sqrt(v) + b).
        """
        (beta1, beta2), updates = group["betas"], (group["step"] + 1) // cohort.period - missed
        if cohort.schedule is None or self.bias_correction == "global":
            return 1 - beta1**updates, (1 - beta2**updates) ** 0.5
        counts = [min(s, updates) for s in cohort.updates(group["step"])]
        both = [(1 - beta1**s, (1 - beta2**s) ** 0.5) for s in counts]
        if len(set(both)) == 1:
            return both[0]
        values = torch.tensor([[x / y for x, y in both], [x * group["eps"] for x, _ in both]], dtype=torch.float64)
        # Copied without a wait: the device may have a whole backward pass before it.
        values = (
            values.to(torch.promote_types(like.dtype, torch.float32))
            .repeat_interleave(cohort.sizes, 1)
            .to(like.device, non_blocking=True)
        )
        shape = [1] * like.dim()
        shape[cohort.dim] = cohort.size
        a, b = (t.view(shape) for t in values.unbind())
        if _whole(like):
            a, b = (torch.empty_like(like).copy_(t) for t in (a, b))
        return a, b


class _Cohort:
    """Parameters of one period and gate and, where they have a gate, of one shape: what is open of one is open of each.

    Of its gated parameters it keeps masks and factors, one for all of them, made again when what they say has changed.
    """

    def __init__(self, period: int, gate: Gate | None, like: Tensor) -> None:
        self.params: list[Tensor] = []
        self.period = period
        self.dim, self.schedule = gate or (0, None)
        self.size, self.opens = 0, [0]
        if self.schedule is not None:
            self.size, blocks = like.shape[self.dim], range(self.schedule.blocks)
            self.opens = [self.schedule.unlock_position(block) for block in blocks]
            self.sizes = torch.tensor([end - start for start, end in self.schedule.block_bounds(self.size)])
        self._kept: dict[str, tuple[Any, Any]] = {}

    def width(self, step: int) -> int | None:
        """Open coordinates along the gated dimension; None when none is locked."""
        if self.schedule is None:
            return None
        width = _width(self.schedule, self.size, step)
        return width if width < self.size else None

    def updates(self, step: int) -> list[int]:
        """Own updates of each block, that of `step` among them; of a locked one, whose moments are 0, those of the newest open."""
        done, newest = (step + 1) // self.period, max(opens for opens in self.opens if opens <= step)
        return [max(1, done - min(opens, newest) // self.period) for opens in self.opens]

    def mask(self, like: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        """1 where a parameter is open, else 0."""
        return self.kept("mask", (like.device, dtype, width), self._filled, like, dtype, 0, 1, width)

    def factor(self, like: Tensor, factor: float, width: int) -> Tensor:
        """The factor where a parameter is open, else 1."""
        about = (like.device, like.dtype, factor, width)
        return self.kept("factor", about, self._filled, like, like.dtype, 1, factor, width)

    def kept(self, name: str, about: tuple[Any, ...], make: Callable[..., Any], *given: Any) -> Any:
        """What was made last under this name, where it was about the same; else make(*given)."""
        if name not in self._kept or self._kept[name][0] != about:
            self._kept[name] = about, make(*given)
        return self._kept[name][1]

    def _filled(self, like: Tensor, dtype: torch.dtype, locked: float, opened: float, width: int) -> Tensor:
        tensor = torch.full_like(like, locked, dtype=dtype)
        tensor.narrow(self.dim, 0, width).fill_(opened)
        return tensor


_Due = list[tuple[_Cohort, list[Tensor], list[Tensor]]]  # cohort, those of its parameters that are to be updated, their gradients


def _batches(due: _Due) -> Iterator[_Due]:
    """What to update at a time: on a GPU all; on a CPU what fits its caches, for there a foreach call is a loop over tensors."""
    if due and due[0][1][0].is_cuda:
        yield due
        return
    for cohort, members, grads in due:
        sizes = accumulate(p.numel() for p in members)
        for _, batch in groupby(zip(sizes, members, grads), lambda entry: entry[0] // BATCH):
            _, some, own = zip(*batch)
            yield [(cohort, list(some), list(own))]


def _whole(tensor: Tensor) -> bool:
    """Whether to work on whole tensors, with a mask, where the open part is meant.

    On a GPU a launch costs more than a pass over memory, and foreach kernels do not take slices along the second dimension.
    They want factors of the tensor's own dtype, so those that would round a factor away are left out.
    """
    return tensor.is_cuda and tensor.element_size() >= 4


@lru_cache(maxsize=1024)
def _width(schedule: ActivationSchedule, size: int, step: int) -> int:
    """Open coordinates; many parameters ask the same question each step."""
    return schedule.active(size, step)
