"""Titans' memory of two layers in C, in fp32 on a CPU: `scan` takes the place of the chunkwise PyTorch scan. See docs/kernels.md.

The dual form's products are small (64 by 64 by 256), and between them PyTorch spends a third of its time on dispatch and passes
over memory. Here they are one walk a (row, head), the state in the processor's cache, and all work goes with the open units.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from proteus_lm.ops._deep_scan import check_position
from proteus_lm.ops._linear_operator import compute_dtype
from proteus_lm.ops.native.build import why_not

_PLAIN = (Tensor, torch.nn.Parameter)


def refuse(tokens: Sequence[Tensor], weights: Sequence[Tensor], layers: int) -> str | None:
    """Why the kernel cannot run these inputs, or None. Builds it where all else fits and it was not built before (some seconds).

    Args:
        tokens: q, k, v, theta, alpha, eta of a call.  weights: its memory of so many layers, and what else it starts from.
    """
    if layers != 2:
        return f"{layers} layer{'s' if layers > 1 else ''}; the C kernel has memories of 2"
    if any(t.device.type != "cpu" for t in (*tokens, *weights)):
        return f"tensors on {tokens[0].device.type}; the C kernel runs on a CPU"
    if compute_dtype(*tokens, *weights) != torch.float32:
        return "float64 tensors; the C kernel computes in float32"
    return _built() or None


@torch.compiler.assume_constant_result
def _built() -> str:
    """`why_not`, which torch.compile asks when it traces."""
    return why_not()


def direct(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernel may be called on these tensors as they are. What traces, or looks on, is to see an operator instead."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active():
        return False
    return all(type(t) in _PLAIN for t in tensors)


def scan(
    tokens: Sequence[Tensor],
    open_rows: Sequence[Tensor],
    weights: Sequence[Tensor],
    momentum: Sequence[Tensor],
    active: Tensor,
    open_active: Tensor | None,
    offset: int | Tensor,
    position: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    chunk: int,
    read: str,
    memory_activation: str,
    final: bool,
    direct: bool,
) -> list[Tensor]:
    """Read and write an MLP memory along rows of tokens; inputs that `refuse` does not name.

    Args:
        tokens, open_rows: any floating types but fp64.
        weights, momentum: fp32 (N, H, in, out); where the call is direct also (H, in, out) of all rows, and no momentum.
        active, open_active, offset, position, cu_seqlens, chunk, read, memory_activation: see `_operator.titans_native`.
        final: give the state at the end too.  direct: see `direct`; else an operator is called.

    Returns:
        y (B, T, H, Dv) in the type of v; with `final`, weights and momentum (N, H, in, out) at each row's last boundary.

    Raises:
        ValueError: for boundaries that do not fit the tokens, or an offset that is not the position.
        MemoryError: where the kernel finds none.
    """
    given = [t.float() for t in tokens], [t.float() for t in open_rows], list(weights), list(momentum)
    flat = [t for part in given for t in part]
    save = torch.is_grad_enabled() and any(t.requires_grad for t in flat)
    options = chunk, read, memory_activation
    if direct:
        from proteus_lm.ops.native._call import Inputs, forward, walk
        from proteus_lm.ops.native._function import Scan

        check_position(offset, position)
        rows = len(tokens[0]) if cu_seqlens is None else len(cu_seqlens) - 1
        way = walk(tokens[0], rows, offset, cu_seqlens, *options)
        if save:
            out = Scan.apply(final, way, active, open_active, *flat)
        else:
            given = Inputs(*given[:2], [*weights, *momentum], active, open_active, way)
            out = forward(given, final=final, save=False)
    else:
        from proteus_lm.ops.native._operator import titans_native

        at = torch.tensor([offset]) if isinstance(offset, int) else offset
        out = titans_native(*given, active, open_active, at, position, cu_seqlens, *options, save)
    return [out[0].to(tokens[2].dtype), *out[1 : 5 if final else 1]]
