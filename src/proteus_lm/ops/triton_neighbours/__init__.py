"""GPU kernels (Triton) of what stands beside a memory: L2 norm, RMS norm with its gate, convolution with SiLU, Comba's vectors,
rotary positions, the product of a SwiGLU MLP, and (`cross_entropy.py`, for `ops.cross_entropy`) the softmax of logits.

Eager PyTorch passes over the tokens 7 to 30 times for each of these; a kernel passes once forward and once backward. `runs` says
whether the kernels take some tensors; where they do not, the mixers run the same mathematics in PyTorch. In compiled code they
never run, for the compiler fuses PyTorch. In the environment PROTEUS_NEIGHBOURS=torch leaves them out.

All compute in fp32, and give the result in the type of the input. No result of a token depends on the length or on the batch:
nothing but the gradients of weights is summed over tokens, and those in one order (no atomics). First derivatives only, and
none by `torch.func`. Importing this package does not need Triton; calling a kernel does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proteus_lm.ops.triton import installed

VARIABLE = "PROTEUS_NEIGHBOURS"
MAX_WIDTH = 8192
"""Numbers under one norm: a program holds them all."""
MAX_TAPS = 8
"""Of a convolution: a program holds their inputs, weights and gradients."""
MAX_PARTS = 3
"""Parts that one convolution's channels are cut into."""
GATES = ("none", "silu", "sigmoid", "add")


def reached(x: Tensor) -> bool:
    """Whether x lies where the kernels run (tests that use the interpreter put another rule here)."""
    return x.is_cuda


def runs(*tensors: Tensor | None) -> bool:
    """Whether the kernels take these tensors: on a GPU, with Triton, eager, none of them float64, not turned off.

    Raises:
        ValueError: for a value of PROTEUS_NEIGHBOURS other than "auto" and "torch".
    """
    if torch.compiler.is_compiling():
        return False
    given = [x for x in tensors if x is not None]
    if not all(reached(x) and x.dtype != torch.float64 and x.numel() for x in given):
        return False
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in ("auto", "torch"):
        raise ValueError(f"{VARIABLE} is {wanted!r}; it must be 'auto' or 'torch'")
    return installed() and wanted == "auto"


class Documents(NamedTuple):
    """Documents packed in one row, as the convolution's kernels read them.

    Args:
        bounds: int32 (N + 1,), where each starts and ends.
        document: int32 (T,), the document of each token.
    """

    bounds: Tensor
    document: Tensor


def documents_of(cu_seqlens: Tensor, length: int) -> Documents:
    """From int (N + 1,) boundaries of the documents in a row of `length` tokens; on the device alone."""
    steps = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), steps, right=True, out_int32=True)
    return Documents(cu_seqlens.int().contiguous(), document)


def l2_norm(x: Tensor, eps: float, active: Tensor | None = None) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last dimension, in x's type.

    Args:
        x: (..., D), D at most MAX_WIDTH; (B, T, H, D) with `active`.
        active: int (B or 1, T), open coordinates of each token: the others count as zero and are zero in the result.
    """
    from proteus_lm.ops.triton_neighbours.norms import L2Norm  # imports triton

    return L2Norm.apply(x, eps, active)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    gate: Tensor | None = None,
    kind: str = "none",
    gate_weight: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """n = x / sqrt(mean x^2 + eps) * weight over the last dimension; n, n silu(h), n sigmoid(h) or n + h, in x's shape.

    Args:
        x: (..., D), D at most MAX_WIDTH.  weight: (D,).
        gate: h, as many numbers as x in the same order; none for n alone.
        kind: one of GATES; "none" without a gate.
        gate_weight: (D,); with it h is the same norm of `gate` with this weight.
        dtype: of the result, x's if None.
    """
    from proteus_lm.ops.triton_neighbours.norms import RMSNorm  # imports triton

    return RMSNorm.apply(x, weight, gate, gate_weight, eps, kind, dtype or x.dtype)


def convolve(
    x: Tensor, weight: Tensor, state: Tensor | None, documents: Documents | None, widths: Sequence[int]
) -> tuple[Tensor, ...]:
    """y_t = SiLU(sum_j weight[:, size - 1 - j] x_{t-j}) for each channel, j < size, cut into parts.

    Args:
        x: (B, T, C); B = 1 with documents.  weight: (C, size), size at most MAX_TAPS.
        state: (N, size - 1, C), what stands before each row's or document's first token, oldest first; zeros if None.
        widths: channels of each part, at most MAX_PARTS, adding up to C.

    Returns:
        Contiguous tensors (B, T, width) in x's type.
    """
    from proteus_lm.ops.triton_neighbours.convolution import Convolution  # imports triton

    return Convolution.apply(x, weight, state, documents, tuple(widths))


def comba_vectors(
    q: Tensor, k: Tensor, decay: Tensor, correction: Tensor | None, eps: float, decay_first: bool, active: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Comba's q', k and p (spec/linear.md 1.3, trap C2) of convolved ones; N is `l2_norm`, a the decay, D the correction.

    Args:
        q, k: (B, T, H, K) of one type, K at most MAX_WIDTH.  decay: (H,).  correction: (H,) or none.
        decay_first: p = N(a k), else p = a N(k).
        active: as `l2_norm`.

    Returns:
        N(q - D a k), N(k), p, each (B, T, H, K).
    """
    from proteus_lm.ops.triton_neighbours.comba import CombaVectors  # imports triton

    return CombaVectors.apply(q, k, decay, correction, active, eps, decay_first)


def turned(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    """Pairs (a, b) of x's last dimension turned: (a cos - b sin, b cos + a sin), in x's type, contiguous.

    Args:
        x: (B, T, H, D), D even, of any strides.
        cosine, sine: (B or 1, T, 1, D), both coordinates of a pair alike; they get no gradient.
        interleaved: pairs are (2i, 2i + 1); else (i, i + D / 2).
    """
    from proteus_lm.ops.triton_neighbours.rotary import Turn  # imports triton

    return Turn.apply(x, cosine, sine, interleaved)


def turned_parts(parts: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `turned` of the queries and keys of a projection, whose gradient is written in one launch, whichever results are used.

    Args:
        parts: (B, T, 3, H, D), queries, keys and values.

    Returns:
        q and k turned, contiguous; v and the queries before the turn, views of `parts`. Each (B, T, H, D).
    """
    from proteus_lm.ops.triton_neighbours.rotary import TurnParts  # imports triton

    return TurnParts.apply(parts, cosine, sine, interleaved)


def swiglu_product(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) b of tensors of one shape and type, in that type."""
    from proteus_lm.ops.triton_neighbours.swiglu import SwiGLU  # imports triton

    return SwiGLU.apply(a, b)
