"""A micro-batch's forward and backward as one CUDA graph, for models bound by launches (MAC: some 40,000 kernels a step)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from proteus_lm.train.step import Inputs, Piece

WARM = 3
"""Calls before the capture: what compiles, tunes or allocates must have done so."""


def captured(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A replay of `work` as a CUDA graph; it gives the same tensor each time, overwritten.

    Raises:
        RuntimeError: for work that waits for the host.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = work()
    except RuntimeError as reason:
        raise RuntimeError(
            f"train.cuda_graph is true, but this model's step cannot be captured: {reason}\nA memory's PyTorch form waits for the "
            "host; Triton's kernels do not: they take bf16 (train.precision=bf16) and, of Titans, heads of 32, 64, 128 and chunks "
            "of 16 to 128 (see `proteus doctor`). Change these, or use train.cuda_graph=false"
        ) from reason

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


class GraphedPiece(Piece):
    """As `Piece`, captured at the first call and replayed from then on. All micro-batches must be alike in shape and predictions.

    Gradients lie where they lay at the capture: between steps they are zeroed, not dropped (`zero_grad(set_to_none=False)`).

    Args:
        parameters: whose gradients it adds to; they have none before the first call.
        capture: makes the replay.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        precision: str,
        device: torch.device,
        parameters: Sequence[nn.Parameter],
        capture: Callable[[Callable[[], Tensor]], Callable[[], Tensor]] = captured,
    ) -> None:
        super().__init__(forward, precision, device)
        self._parameters, self._capture = parameters, capture
        self._replay: Callable[[], Tensor] | None = None

    def __call__(self, piece: Inputs, predictions: int) -> Tensor:
        """As `Piece`. Raises ValueError for a micro-batch unlike the one that was captured, or with packed documents."""
        if piece.boundaries is not None:
            raise ValueError(
                "packed documents differ in shape from batch to batch; a CUDA graph cannot: use train.cuda_graph=false"
            )
        alike = (tuple(piece.ids.shape), predictions)
        if self._replay is None:
            self._alike, self._replay = alike, self._make(piece, predictions)
        if alike != self._alike:
            raise ValueError(f"a micro-batch of (shape, predictions) {alike}; the CUDA graph was captured for {self._alike}")
        self._ids.copy_(piece.ids, non_blocking=True)
        self._targets.copy_(piece.targets, non_blocking=True)
        return self._replay().clone()

    def _make(self, piece: Inputs, predictions: int) -> Callable[[], Tensor]:
        self._ids, self._targets = (t.to(self.device, copy=True) for t in (piece.ids, piece.targets))

        def work() -> Tensor:
            return self.run(self._ids, self._targets, None, predictions)

        if self.device.type == "cuda":  # PyTorch asks for a side stream before a capture
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._warm(work)
            torch.cuda.current_stream().wait_stream(stream)
        else:
            self._warm(work)
        replay = self._capture(work)
        self._clear()
        return replay

    def _warm(self, work: Callable[[], Tensor]) -> None:
        for _ in range(WARM):
            work()
        self._clear()

    def _clear(self) -> None:
        """Zero what the calls before the first replay added."""
        torch._foreach_zero_([p.grad for p in self._parameters if p.grad is not None])
