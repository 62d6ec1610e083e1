"""RetNet (spec/linear.md 1.1, 2.8): rotary positions, and one constant decay a head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from proteus_lm.mixers.base import MatrixMixer, hebbian_flops
from proteus_lm.mixers.rotary import check_rotary, rotate, turn_at
from proteus_lm.ops import retention
from proteus_lm.ops.recurrent import retention_step
from proteus_lm.sequence import TokenSequence

if TYPE_CHECKING:
    from proteus_lm.config import ProteusConfig


class RetNetMixer(MatrixMixer):
    """S_t = gamma_h S_{t-1} + k_t v_t^T;  o_t = K^-1/2 S_t^T q_t;  y = out(RMSNorm(o) * silu(gate)), gamma_h = 1 - 2^(-5 - h).

    q, k and v are linear maps, without convolution, activation or norm. q and k are turned by the token's position in pairs
    (2i, 2i + 1): partners stand in one block of rows, so that q~_t . k~_s depends on t - s whatever is open.
    """

    fields = MatrixMixer.fields - {"conv_size", "norm_order"}
    defaults = {"value_expansion": 2}  # noqa: RUF012 - as declared by Mixer
    rule, rule_step = staticmethod(retention), staticmethod(retention_step)
    memory_flops = staticmethod(hebbian_flops)

    @classmethod
    def taps(cls, config: ProteusConfig) -> int:
        """No convolution."""
        return 0

    @classmethod
    def validate(cls, config: ProteusConfig) -> None:
        """Rotary pairs exist, and no block of rows cuts one."""
        super().validate(config)
        check_rotary(config.head_dim)
        rows = config.head_dim // config.memory_blocks
        if config.memory_axis == "key" and config.memory_blocks > 1 and rows % 2:
            raise ValueError(
                f"memory_blocks is {config.memory_blocks} with head_dim {config.head_dim}: blocks of {rows} rows cut rotary pairs; "
                f"use a head_dim of which {config.memory_blocks} blocks have an even number of rows, or memory_axis 'value'"
            )

    def arguments(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, sequence: TokenSequence) -> tuple[Tensor, ...]:
        """q, k, v, g."""
        turn = turn_at(sequence, q, interleaved=True)
        heads = torch.arange(q.shape[2], device=q.device, dtype=turn[0].dtype)
        g = torch.log1p(-(2.0 ** (-5 - heads)))
        return rotate(q, turn, interleaved=True), rotate(k, turn, interleaved=True), v, g.expand(q.shape[:3])
