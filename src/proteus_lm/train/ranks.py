"""Plain data parallelism: each process takes its slice of the batch, gradients are summed, rank 0 writes.

One process is the case of world size 1, with no process group and no communication.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run: `rank` of `world_size`, on `device`; `joined` when `start` made the process group."""

    rank: int
    world_size: int
    device: torch.device
    joined: bool = False

    @classmethod
    def start(cls, device: torch.device) -> Ranks:
        """Join the processes that torchrun started (environment RANK, WORLD_SIZE, LOCAL_RANK), or stand alone."""
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size == 1:
            return cls(0, 1, device)
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        joined = not dist.is_initialized()
        if joined:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), world_size, device, joined)

    def leave(self) -> None:
        """Give up the process group that `start` made."""
        if self.joined:
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this process writes files and lines."""
        return self.rank == 0

    def total(self, value: float) -> float:
        """The sum of a number over the processes, in fp64."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.item()

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Sum tensors over the processes, in place."""
        if self.world_size > 1:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                if work is not None:
                    work.wait()

    def check_same(self, model: nn.Module) -> None:
        """Raise RuntimeError when the processes do not start from the same weights."""
        if self.world_size > 1:
            checksum = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum()
            low, high = checksum.clone(), checksum.clone()
            dist.all_reduce(low, op=dist.ReduceOp.MIN)
            dist.all_reduce(high, op=dist.ReduceOp.MAX)
            if low.item() != high.item():
                raise RuntimeError("the processes start from different weights; use one version of PyTorch on every machine")

    def wait(self) -> None:
        """Until every process is here."""
        if self.world_size > 1:
            dist.barrier()
