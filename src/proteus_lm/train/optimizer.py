"""AdamW, gated for a model whose updates are on a schedule: which parameters decay, and how the learning rate moves.

A parameter does not decay when its module marks it (`parameter._no_weight_decay = True`: gates, A_log, dt_bias, D, learned initial
memories), when it has fewer than two dimensions (norms, biases), or when it is an embedding table. The rest decays.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from proteus_lm.config import ProteusConfig
from proteus_lm.hope import update_gates
from proteus_lm.model import ProteusForCausalLM
from proteus_lm.optim import GatedAdamW
from proteus_lm.train.recipe import TrainRecipe


@dataclass(frozen=True)
class Groups:
    """Trainable parameters by name: those that decay, and those that do not with the reason for each."""

    decay: dict[str, nn.Parameter]
    no_decay: dict[str, nn.Parameter]
    reasons: dict[str, str]

    def lines(self) -> list[str]:
        """The groups as lines for a log; layers that differ in their number only are named once, with * for it."""
        lines = []
        for title, group in (("weight decay", self.decay), ("no weight decay", self.no_decay)):
            names = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in group)
            count = sum(p.numel() for p in group.values())
            lines.append(f"{title}: {len(group)} tensors, {count:,} numbers: {', '.join(names) or 'none'}")
        return lines

    def to_dict(self) -> dict[str, dict[str, str]]:
        """{"decay": {name: shape}, "no_decay": {name: reason}}: what RUN/parameters.json holds."""
        return {"decay": {n: "x".join(map(str, p.shape)) for n, p in self.decay.items()}, "no_decay": dict(self.reasons)}


def decay_groups(model: nn.Module) -> Groups:
    """Part the trainable parameters of a model by the rule on top of this file; a shared tensor counts once, by its first name."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    groups = Groups({}, {}, {})
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        reason = _no_decay_reason(parameter, embeddings)
        if reason is None:
            groups.decay[name] = parameter
        else:
            groups.no_decay[name] = parameter
            groups.reasons[name] = reason
    return groups


def _no_decay_reason(parameter: nn.Parameter, embeddings: set[int]) -> str | None:
    if getattr(parameter, "_no_weight_decay", False):
        return "marked by its module"
    if id(parameter) in embeddings:
        return "embedding"
    return f"{parameter.dim()} dimension(s)" if parameter.dim() < 2 else None


def make_optimizer(model: ProteusForCausalLM, groups: Groups, recipe: TrainRecipe) -> torch.optim.Optimizer:
    """`GatedAdamW` for a model that has update periods or blocks (Hope, `proteus_lm.hope`), AdamW for every other."""
    masks, periods = update_gates(model, cast(ProteusConfig, model.config), recipe.steps)
    if not masks and not periods:
        return make_adamw(groups, recipe)
    return GatedAdamW(
        _parameter_groups(groups, recipe),
        lr=recipe.lr,
        betas=recipe.betas,
        eps=recipe.eps,
        masks=masks,
        periods=periods,
        decay_locked=recipe.decay_locked,
        bias_correction=recipe.bias_correction,
    )


def make_adamw(groups: Groups, recipe: TrainRecipe) -> torch.optim.AdamW:
    """AdamW over the two groups, in one fused kernel a step where the device has it; moments in the parameters' own fp32."""
    return torch.optim.AdamW(_parameter_groups(groups, recipe), lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True)


def _parameter_groups(groups: Groups, recipe: TrainRecipe) -> list[dict[str, Any]]:
    parameters = [
        {"params": list(groups.decay.values()), "weight_decay": recipe.weight_decay},
        {"params": list(groups.no_decay.values()), "weight_decay": 0.0},
    ]
    return [group for group in parameters if group["params"]]


def learning_rate(recipe: TrainRecipe, step: int) -> float:
    """Learning rate of optimiser step `step` (1 .. steps).

    Linear warm-up reaches the peak at step `warmup`; the cosine then falls to min_lr_ratio * lr at the last step.
    """
    if step <= recipe.warmup:
        return recipe.lr * step / recipe.warmup
    if recipe.schedule == "constant":
        return recipe.lr
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    low = recipe.lr * recipe.min_lr_ratio
    return low + 0.5 * (recipe.lr - low) * (1.0 + math.cos(math.pi * min(1.0, progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Give every group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = value


def moments(optimizer: torch.optim.Optimizer, groups: Groups) -> dict[str, Tensor]:
    """The optimiser's state by parameter name, on its own device: exp_avg.NAME, exp_avg_sq.NAME, step.NAME (fp32).

    A gated one has the gradients of an unfinished period, gradient_sum.NAME, the updates that a parameter had no gradient for,
    missed.NAME, where there were any, and one count, `steps` (int64, not by name).
    """
    found: dict[str, Tensor] = {"steps": torch.tensor(optimizer.steps)} if isinstance(optimizer, GatedAdamW) else {}
    for name, parameter in (groups.decay | groups.no_decay).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{key}.{name}"] = torch.as_tensor(value)
    return found


def load_moments(optimizer: torch.optim.Optimizer, groups: Groups, saved: dict[str, Tensor]) -> None:
    """Put back what `moments` gave.

    Raises:
        ValueError: when a name or a shape is not that of this model, or the state is that of another kind of optimiser.
    """
    parameters = groups.decay | groups.no_decay
    if isinstance(optimizer, GatedAdamW):
        if "steps" not in saved:
            raise ValueError("the saved optimiser state has no count of steps: it is not that of a gated optimiser")
        optimizer.steps = int(saved["steps"])
        saved = {key: value for key, value in saved.items() if key != "steps"}
    for key, value in saved.items():
        kind, _, name = key.partition(".")
        parameter = parameters.get(name)
        if parameter is None or (kind not in ("step", "missed") and value.shape != parameter.shape):
            shape = None if parameter is None else tuple(parameter.shape)
            raise ValueError(f"the saved optimiser state {key} has shape {tuple(value.shape)}; this model's is {shape}")
        # The step count stays where AdamW keeps it: beside the weights for a fused one.
        state = optimizer.state[parameter]
        state[kind] = int(value) if kind == "missed" else value.to(device=parameter.device, copy=True)
