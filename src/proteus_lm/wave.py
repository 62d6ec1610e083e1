"""Layers in a wave: piece g of a sequence in layer l beside piece g + 1 in layer l - 1, each layer on a CUDA stream of its own.

A model whose time goes into small kernels in a row (MAC: segment after segment, layer after layer) leaves a GPU almost empty.
Piece g of layer l waits only for the same piece of the layer below and for the state that piece g - 1 of its own layer left, so up
to as many chains run at once as there are layers. The backward is a wave too: autograd runs each node on its forward's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from proteus_lm.schedule import ActivationSchedule
from proteus_lm.sequence import TokenSequence

Layer = Callable[[Tensor, TokenSequence, Any, bool], tuple[Tensor, Any]]


@torch.compiler.disable(recursive=False, reason="streams: the layers it calls are compiled, each by itself")
def run_wave(layers: Sequence[Layer], x: Tensor, schedule: ActivationSchedule, pieces: int) -> Tensor:
    """What `layers` one after the other make of whole rows that start at position 0; gradients flow through all states.

    Nothing here waits for the host, so that a CUDA graph can hold it. On the CPU the same pieces run in plain order.

    Args:
        layers: as `Mixer.forward`.
        x: (B, T, hidden), T >= 1.
        schedule: when blocks of memory open.
        pieces: to cut T into, as even as can be; fewer where one would have a single token, which is a decoding step.

    Returns:
        (B, T, hidden).
    """
    length, pieces = x.shape[1], max(1, min(pieces, x.shape[1] // 2))
    bounds = [length * i // pieces for i in range(pieces + 1)]
    main, *lanes = _lanes(x.device, len(layers))
    states: list[Any] = [None] * len(layers)
    done = []
    for start, end, piece in zip(bounds, bounds[1:], x.split([b - a for a, b in zip(bounds, bounds[1:])], 1)):
        before = main
        for i, (layer, lane) in enumerate(zip(layers, lanes)):
            lane.take(piece, before)
            with lane.context():
                # A sequence of its own: what it makes once and keeps would else be shared among streams.
                offset = torch.full((len(x),), start, device=x.device) if start else None
                sequence = TokenSequence(schedule, len(x), end - start, offset=offset, device=x.device, start=start or None)
                piece, states[i] = layer(piece, sequence, states[i], end < length)
            before = lane
        done.append(piece)
    for piece in done:  # the last piece of the last layer is behind all work: every stream is joined with it
        main.take(piece, lanes[-1])
    return torch.cat(done, 1)


class Lane:
    """Where a layer's work stands in order: a CUDA stream, or None for the program's own order."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    @torch.compiler.disable(reason="a compiled wait is not seen by a CUDA graph's capture, and no graph takes record_stream")
    def take(self, x: Tensor, before: Lane) -> None:
        """Let what follows here read x, which was made there: it waits for all that was asked for there so far.

        The allocator knows only the stream that x was made on: once x is freed (by the backward of the layer that took it, at
        the latest), it would hand its memory out there while kernels here may not have read it yet. `record_stream` makes it
        wait for them; during a capture it keeps the memory to the capture's end. What else a layer makes, states too, is used
        and freed on its own stream; gradients that change streams autograd records itself.
        """
        if self._stream is not None and before._stream is not None:
            self._stream.wait_stream(before._stream)
            x.record_stream(self._stream)

    def context(self) -> AbstractContextManager[Any]:
        """Work goes here."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _lanes(device: torch.device, count: int) -> list[Lane]:
    """Where the caller's work goes, and one more for each layer: the same ones at each call, since memory is cached by stream."""
    if device.type != "cuda":
        return [Lane(None)] * (1 + count)
    return [Lane(torch.cuda.current_stream(device)), *(Lane(_stream(device, i)) for i in range(count))]


@cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
