"""GPU kernels (Triton) of what a segment of MAC does around its memory, one launch each way: reading a memory that stands still,
step sizes from the values of their maps, and attention.

A segment waits for the one before it, so that time goes into the number of launches. All compute in fp32 (products of tensors in
bf16 or fp16 take their factors in that type) and give what PyTorch gives that stands beside them. First derivatives only. Importing
this needs no Triton; calling a kernel does.
"""

from __future__ import annotations

from torch import Tensor

from proteus_lm.ops.late_linear import LateSum

MAX_DIM = 128
"""Numbers of a head in `attend`: programs hold tiles of them."""


def still_read(
    q: Tensor, cells: Tensor, active: Tensor, hidden: int, dv: int, chunk: int, memory_activation: str
) -> tuple[Tensor, Tensor]:
    """f(q) of a memory of two layers that no token writes (`memory_read.titans_read`), and the state to go on from.

    Args:
        q: (N, T, H, D), T whole chunks; sizes and types that `triton_deep.refuse` does not name.
        cells: fp32 (N * H, cells), as `triton_deep.pack` gives it.
        active: int32 (N or 1, T), open hidden units of each query, growing along T.
        hidden, dv: units of the memory, and its width of values.

    Returns:
        (N, T, H, dv) in q's type; `cells`, through which the gradients of all later uses must come.
    """
    from proteus_lm.ops.triton_mac._still import StillRead

    return StillRead.apply(q, cells, active, hidden, dv, chunk, memory_activation)


def step_sizes(z: Tensor, heads: int, alpha: bool, eta: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """theta = scale sigmoid(z_theta) (1 - eta), alpha = sigmoid(z_alpha), eta = sigmoid(z_eta), fp32 (.., heads) each.

    Args:
        z: fp32 (.., heads * maps), theta's values, alpha's and eta's side by side as far as there are any; those missing give 0.
    """
    from proteus_lm.ops.triton_mac._sizes import StepSizes

    return StepSizes.apply(z, heads, alpha, eta, scale)


def attend(
    q: Tensor, plain: Tensor, made: Tensor, cosine: Tensor, sine: Tensor, k: Tensor, v: Tensor, front: LateSum | None
) -> Tensor:
    """Softmax attention of a whole segment: a token sees the prefix, what was recalled up to its own place, and so of tokens.

    In fp32, products in q's type with sums in fp32 (fp32: in tf32 where PyTorch may, else in three of them).

    Args:
        q, k: (N, T, H, D), turned to their positions, D even and at most MAX_DIM.  v: (N, T, H, D).
        plain: (N, T, H, D), the queries before they were turned, which meet the prefix; read with a prefix alone.
        made: (N, T, 2, H, D), keys (not turned) and values that were recalled.
        cosine, sine: (N or 1, T, 1, D), their turn: half-split, both coordinates of a pair alike; no gradient.
        front: of (n, 2, H, D), keys and values of the prefix.

    Returns:
        (N, T, H, D), contiguous, in q's type.
    """
    from proteus_lm.ops.triton_mac._attention import Attend

    return Attend.apply(q, plain, made, cosine, sine, k, v, front, None if front is None else front.end)
