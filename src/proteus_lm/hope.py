"""Hope's chain of MLP blocks (Proteus eq 16-18, spec/deep.md 4): in place of a layer's one MLP, levels with a pace each.

    h <- h + MLP_l(RMSNorm(h)),  l = 1 .. k;   level l is updated every C_l optimiser steps, by the mean of their gradients.

With `update_blocks` E the hidden units of every level open for updates over the training steps (eq 14-15). The forward is never
masked: a locked unit works with its initial weights. `proteus_lm.optim.GatedAdamW` does both; `update_gates` tells it what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from proteus_lm.mixers.norm import RMSNorm
from proteus_lm.mlp import MLP
from proteus_lm.optim import Gate
from proteus_lm.schedule import ActivationSchedule

if TYPE_CHECKING:
    from proteus_lm.config import ProteusConfig


class UpdateGates(NamedTuple):
    """What `GatedAdamW` takes: masks, parameter -> (dimension, schedule over optimiser steps); periods, parameter -> C."""

    masks: dict[Tensor, Gate]
    periods: dict[Tensor, int]


class Level(nn.Module):
    """One element of the chain: x + MLP(RMSNorm(x)).

    The papers leave norms out ("we disregard normalizations"); norm and residual keep a chain of any length trainable.
    """

    def __init__(self, hidden: int, inner: int, eps: float, period: int) -> None:
        super().__init__()
        self.norm, self.mlp, self.period = RMSNorm(hidden, eps), MLP(hidden, inner), period

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        return x + self.mlp(self.norm(x))


class Chain(nn.Module):
    """The levels of one layer, in order; their hidden widths add up to `intermediate_size`, that of the one MLP they replace."""

    def __init__(self, config: ProteusConfig) -> None:
        super().__init__()
        sizes = zip(level_widths(config), config.chain_periods)
        self.levels = nn.ModuleList([Level(config.hidden_size, width, config.norm_eps, period) for width, period in sizes])

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        for level in self.levels:
            x = level(x)
        return x


def level_widths(config: ProteusConfig) -> list[int]:
    """Hidden units of each level: equal parts of `intermediate_size`; the first levels take the remainder, a unit each."""
    width, rest = divmod(config.intermediate_size, len(config.chain_periods))
    return [width + (level < rest) for level in range(len(config.chain_periods))]


def check_chain(config: ProteusConfig) -> None:
    """Raise ValueError for a chain without levels, or whose levels cannot be cut into the blocks asked for."""
    if config.chain_periods is None:
        raise ValueError("chain_periods is None with channel 'chain'; give a period for each level, such as [1, 2, 4, 8]")
    narrowest = level_widths(config)[-1]
    if narrowest < config.update_blocks:
        raise ValueError(
            f"intermediate_size is {config.intermediate_size} over {len(config.chain_periods)} levels: {narrowest} hidden units "
            f"each, and update_blocks is {config.update_blocks}; use fewer blocks or chain_periods, or a larger intermediate_size"
        )


def update_schedule(config: ProteusConfig, steps: int) -> ActivationSchedule:
    """When the blocks of hidden units open for updates: E over the first `schedule_frac` of `steps` optimiser steps."""
    return ActivationSchedule(config.update_blocks, max(1, round(config.schedule_frac * steps)))


def update_gates(model: nn.Module, config: ProteusConfig, steps: int) -> UpdateGates:
    """Masks and periods of every chain in a model, for a training of `steps` optimiser steps; both empty without one.

    A hidden unit is a row of `up` and `gate` and a column of `down`. Norms are never masked; a level's norm keeps its level's
    period, so that the level as a whole stands still between its updates.
    """
    gates = UpdateGates({}, {})
    schedule = update_schedule(config, steps)
    for level in (module for module in model.modules() if isinstance(module, Level)):
        if schedule.blocks > 1:
            maps = ((level.mlp.gate, 0), (level.mlp.up, 0), (level.mlp.down, 1))
            gates.masks.update({linear.weight: (dim, schedule) for linear, dim in maps})
        if level.period > 1:
            gates.periods.update(dict.fromkeys(level.parameters(), level.period))
    return gates
