"""The loss of a language model from its last hidden states, by pieces of tokens: the logits of a whole batch never exist.

A piece's logits are made once, its loss and the gradients of hidden states and weight at once from them, and the next piece takes
their place in memory. So the forward pass does the work of both, and the backward pass multiplies by one number: three products, as
many as with whole logits. The gradients lie there between the two passes, as Liger's fused linear cross entropy keeps them
(arXiv 2410.10989, 3.2) and torch's `linear_cross_entropy` with options. On a CPU logits that fit one piece are made whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from proteus_lm.ops.triton_neighbours import runs

IGNORED = -100
GPU_BYTES = 2**29
"""Logits of a piece on a GPU, at most: few and large products. 8,192 tokens for 32,000 words in 16 bits."""
CPU_BYTES, CPU_TOKENS = 2**22, 256
"""Logits of a piece on a CPU, in fp32, that its caches hold; but no fewer tokens: each piece walks the weight's gradient."""
ROUND = 128
"""Tokens of a piece on a GPU are a multiple of these: products without a part of a tile."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = IGNORED) -> Tensor:
    """Sum over the targets of -log softmax(hidden weight^T)[target], without the logits of all tokens in memory.

    The logits have the type that `torch.nn.functional.linear` would give them (under autocast its type, fp64 aside), all behind
    them is fp32 or wider; the weight's gradient is summed over pieces in fp32 or wider, too. Where gradients are wanted they are
    made in the forward pass. Waits for no GPU. Under torch.compile the pieces are one operator that is not looked into.

    Args:
        hidden: (..., D).  weight: (V, D), on the same device.
        targets: int64, hidden's shape without the last dimension: 0 to V - 1, or `ignore_index` for a token that is not scored.

    Returns:
        The sum in nats, (), fp32; fp64 of fp64. 0 where nothing is scored. First derivatives only; not for torch.func's transforms.

    Raises:
        ValueError: for shapes or types that do not fit together, and on the CPU for targets outside of 0 .. V - 1; a GPU, which
            would have to be waited for, gives NaN for them or stops its kernels.
        RuntimeError: from a backward pass with `create_graph=True`, of pieces.
    """
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:] or targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)} do not fit together; "
            "give (..., D), (V, D) and (...)"
        )
    if not len(weight):
        raise ValueError(f"weight is {tuple(weight.shape)}: no words to choose among; give at least one row")
    if targets.dtype != torch.int64:
        raise ValueError(f"targets are {targets.dtype}; give int64, as targets.long() is")
    if hidden.device != weight.device or targets.device != weight.device:
        raise ValueError(f"hidden is on {hidden.device}, weight on {weight.device}, targets on {targets.device}; put all on one")
    dtype = _product_dtype(hidden)
    if hidden.dtype != weight.dtype and (not _autocast(hidden) or weight.dtype == torch.float64):
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}; give one type, or use autocast")
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if hidden.device.type == "cpu" and len(rows) <= _piece_tokens(len(rows), len(weight), dtype, hidden.device):
        return _whole(rows, weight, flat, ignore_index)
    wanted = [x.requires_grad and torch.is_grad_enabled() for x in (hidden, weight)]
    return _LinearCrossEntropy.apply(rows, weight, flat, ignore_index, dtype, *wanted)  # pyright: ignore[reportReturnType]


def _autocast(x: Tensor) -> bool:
    """Whether autocast rounds x: it leaves fp64 as it is."""
    return torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def _product_dtype(hidden: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(hidden.device.type) if _autocast(hidden) else hidden.dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _whole(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """The sum from all logits: few logits take as long as the calls that pieces need besides."""
    if not torch.compiler.is_compiling():
        _check_targets(targets, len(weight), ignore_index)
    logits = linear(hidden, weight)
    return cross_entropy(logits.to(_wide(logits.dtype)), targets, ignore_index=ignore_index, reduction="sum")


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum, and the gradients that its forward pass made."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignore_index: int,
        dtype: torch.dtype,
        to_hidden: bool,
        to_weight: bool,
    ) -> Tensor:
        make = _operator if torch.compiler.is_compiling() else _by_pieces
        loss, *grads = make(hidden, weight, targets, ignore_index, dtype, to_hidden, to_weight)
        ctx.save_for_backward(*grads)
        ctx.wanted = [(to_hidden, hidden.dtype), (to_weight, weight.dtype)]
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "linear_cross_entropy gives first derivatives only, and create_graph=True asks for the second; take the loss from "
                "whole logits (a model's forward without skip_logits)"
            )
        made = list(ctx.saved_tensors)
        # Multiplied in fp32 or wider: 1 / tokens has no exact place in 16 bits, and every gradient would carry its error.
        grads = [(made.pop(0).to(_wide(dtype)) * upstream[0]).to(dtype) if wanted else None for wanted, dtype in ctx.wanted]
        return *grads, None, None, None, None, None


def _by_pieces(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, dtype: torch.dtype, to_hidden: bool, to_weight: bool
) -> list[Tensor]:
    """The sum and the gradients that are wanted, of hidden (N, D) in the type of the product and of weight (V, D) in fp32 or wider.

    Args:
        dtype: of the product.
    """
    _check_targets(targets, len(weight), ignore_index)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        words, wide = weight.to(dtype), _wide(dtype)
        size = _piece_tokens(len(hidden), len(words), dtype, hidden.device)
        room = torch.empty(min(size, len(hidden)), len(words), dtype=dtype, device=hidden.device)
        losses = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        d_hidden = torch.empty_like(hidden, dtype=dtype, memory_format=torch.contiguous_format) if to_hidden else None
        d_weight = torch.zeros_like(weight, dtype=wide, memory_format=torch.contiguous_format) if to_weight else None
        for first in range(0, len(hidden), size):
            piece = slice(first, first + size)
            part = hidden[piece].to(dtype)
            logits = torch.mm(part, words.t(), out=room[: len(part)])
            losses[piece] = _to_gradients(logits, targets[piece], ignore_index, to_hidden or to_weight)
            if d_hidden is not None:
                torch.mm(logits, words, out=d_hidden[piece])
            if d_weight is not None:
                _add_product(d_weight, logits.t(), part)
        return [losses.sum(), *(x for x in (d_hidden, d_weight) if x is not None)]


_operator = torch.library.custom_op("proteus_lm::linear_cross_entropy", _by_pieces, mutates_args=())


@_operator.register_fake
def _(hidden, weight, targets, ignore_index, dtype, to_hidden, to_weight):  # noqa: ANN001
    grads = [hidden.new_empty(hidden.shape, dtype=dtype)] if to_hidden else []
    grads += [weight.new_empty(weight.shape, dtype=_wide(dtype))] if to_weight else []
    return [hidden.new_empty((), dtype=_wide(dtype)), *grads]


def _piece_tokens(tokens: int, words: int, dtype: torch.dtype, device: torch.device) -> int:
    """Tokens of a piece; on a GPU in pieces as even as may be."""
    if device.type == "cpu":
        return max(CPU_TOKENS, CPU_BYTES // (4 * words))
    most = max(ROUND, GPU_BYTES // (words * dtype.itemsize) // ROUND * ROUND)
    even = -(-tokens // max(1, -(-tokens // most)))
    return max(ROUND, -(-even // ROUND) * ROUND)


def _check_targets(targets: Tensor, words: int, ignore_index: int) -> None:
    """Raise ValueError for targets outside the vocabulary where the host can look without waiting."""
    if targets.device.type == "cpu":
        bad = ((targets < 0) | (targets >= words)) & (targets != ignore_index)
        if bad.any():
            raise ValueError(
                f"targets hold {targets[bad][0].item()}; give 0 to {words - 1}, or {ignore_index} for a token that is not scored"
            )


def _to_gradients(logits: Tensor, targets: Tensor, ignore_index: int, gradients: bool) -> Tensor:
    """Losses (N,), fp32 or wider, of logits (N, V), which become with `gradients` those of the losses' sum to them."""
    if runs(logits):
        from proteus_lm.ops.triton_neighbours.cross_entropy import softmax_gradients  # imports triton

        return softmax_gradients(logits, targets, ignore_index, gradients)
    # In place as far as it goes, each number's exponential taken once: on a CPU faster than log_softmax and its backward.
    ignored = targets == ignore_index
    place = torch.where(ignored, 0, targets)[:, None]
    shares = logits.to(_wide(logits.dtype))
    shares -= shares.amax(1, keepdim=True)
    scored = shares.gather(1, place)
    total = shares.exp_().sum(1, keepdim=True)
    losses = torch.where(ignored, 0, (total.log() - scored)[:, 0])
    if gradients:
        shares.scatter_(1, place, shares.gather(1, place) - total)
        shares *= torch.where(ignored[:, None], 0, total.reciprocal())
        if shares is not logits:
            logits.copy_(shares)
    return losses


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b; from 16 bits the product is in fp32, too, where the device can give it so."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += torch.mm(a, b, out_dtype=total.dtype) if a.is_cuda else torch.mm(a, b)
