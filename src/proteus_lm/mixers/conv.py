"""Short causal depthwise convolution with SiLU: one line of shifted products, or a kernel on a GPU.

A sum of `size` products rather than a library convolution: its result for a token does not depend on the length or the batch,
packed documents need no other code, and `torch.compile` fuses it. Eager, it is bound by passes over memory: there a kernel runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from proteus_lm.ops.triton_neighbours import MAX_PARTS, MAX_TAPS, convolve, documents_of, runs
from proteus_lm.sequence import TokenSequence


class ShortConvolution(nn.Module):
    """y_t = SiLU(sum_{j < size} w_j x_{t-j}) for each channel, nothing before a document's first token.

    The state is the last size - 1 inputs, (N, size - 1, C), oldest first.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, size))

    def init_weights(self) -> None:
        """Uniform within 1 / sqrt(size), as torch initialises a depthwise convolution."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, sequence: TokenSequence, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x (B, T, C) -> y (B, T, C) and the state after it (N, size - 1, C); x packed as `sequence` says."""
        (y,), state = self.parts(x, sequence, state, [x.shape[-1]])
        return y, state

    def parts(
        self, x: Tensor, sequence: TokenSequence, state: Tensor | None, widths: Sequence[int]
    ) -> tuple[Sequence[Tensor], Tensor]:
        """As `forward`, with y cut into tensors (B, T, width), one a width."""
        state = None if state is None else state.to(x.dtype)
        if len(widths) <= MAX_PARTS and self.weight.shape[1] <= MAX_TAPS and runs(x, self.weight):
            packed = None
            if sequence.cu_seqlens is not None:
                bounds, length = sequence.cu_seqlens, sequence.length
                packed = sequence.once("documents", lambda: documents_of(bounds, length))
            return convolve(x, self.weight, state, packed, widths), self._after(x, sequence, state)
        y, state = self._shifted(x, sequence, state)
        return y.split(list(widths), -1), state

    def _after(self, x: Tensor, sequence: TokenSequence, state: Tensor | None) -> Tensor:
        """The last size - 1 inputs of each row or document."""
        past = self.weight.shape[1] - 1
        if sequence.cu_seqlens is not None:
            token, slot, inside = sequence.once(("last inputs", past), lambda: _last_inputs(sequence, past))
            earlier = x.new_zeros(()) if state is None else torch.take_along_dim(state, slot[..., None], 1)
            return torch.where(inside[..., None], x[0][token], earlier)
        if x.shape[1] >= past:
            return x[:, x.shape[1] - past :]
        return pad(x, (0, 0, past - x.shape[1], 0)) if state is None else torch.cat((state[:, x.shape[1] :], x), 1)

    def _shifted(self, x: Tensor, sequence: TokenSequence, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `forward`, in PyTorch."""
        past = self.weight.shape[1] - 1
        gaps = sequence.gaps(past) if sequence.cu_seqlens is not None else None
        if gaps is not None:
            row = x.new_zeros(gaps.length, x.shape[-1]).index_copy(0, gaps.tokens, x[0])
            if state is not None:
                row = row.index_copy(0, gaps.free.flatten(), state.flatten(0, 1))
            row = row[None]
        else:
            row = pad(x, (0, 0, past, 0)) if state is None else torch.cat((state, x), 1)
        length = row.shape[1] - past
        weight = self.weight.to(x.dtype)
        y = sum((row[:, j : j + length] * weight[:, j] for j in range(1, past + 1)), row[:, :length] * weight[:, 0])
        if gaps is None:
            return silu(y), row[:, length:]
        return silu(y[:, gaps.tokens - past]), row[0][gaps.last]


def _last_inputs(sequence: TokenSequence, past: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the last `past` inputs behind each packed document, (N, past): their tokens, or their slots in the state before it, and
    which of them are tokens."""
    assert sequence.cu_seqlens is not None, "rows that are not packed end at their last token"
    bounds = sequence.cu_seqlens.long()
    token = bounds[1:, None] - past + torch.arange(past, device=bounds.device)
    before = token - bounds[:-1, None]
    return token.clamp(min=0), (before + past).clamp(max=past - 1), before >= 0


class ConvProjection(nn.Module):
    """Linear map, short convolution and SiLU, cut into heads: x (B, T, hidden) -> tensors (B, T, heads, width).

    With `size` 0 the linear map alone, and no SiLU.
    """

    def __init__(self, hidden: int, heads: int, widths: Sequence[int], size: int) -> None:
        super().__init__()
        self.heads, self.widths = heads, list(widths)
        self.linear = nn.Linear(hidden, heads * sum(widths), bias=False)
        self.conv = ShortConvolution(heads * sum(widths), size) if size else None

    @staticmethod
    def parameter_count(hidden: int, heads: int, widths: Sequence[int], size: int) -> int:
        """Parameters: the map and the taps."""
        return heads * sum(widths) * (hidden + size)

    @staticmethod
    def flops(hidden: int, heads: int, widths: Sequence[int], size: int) -> int:
        """Floating-point operations for a token (a multiplication with its addition counts two)."""
        return 2 * ConvProjection.parameter_count(hidden, heads, widths, size)

    def init_state(self, batch: int, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """The convolution's state before the first token, zeros (batch, size - 1, channels); (batch, 0, channels) without one."""
        past = 0 if self.conv is None else self.conv.weight.shape[1] - 1
        return torch.zeros(batch, past, self.linear.out_features, device=device, dtype=dtype)

    def forward(self, x: Tensor, sequence: TokenSequence, state: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """x (B, T, hidden) -> one tensor (B, T, heads, width) a width, and the convolution's state."""
        y = self.linear(x)
        widths = [self.heads * width for width in self.widths]
        if self.conv is None:
            parts, after = y.split(widths, -1), y.new_zeros(sequence.rows, 0, y.shape[-1])
        else:
            parts, after = self.conv.parts(y, sequence, state, widths)
        return [part.unflatten(-1, (self.heads, -1)) for part in parts], after
