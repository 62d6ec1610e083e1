"""GPU kernels (Triton) of what a segment of MAC does around its memory, one launch each way: reading a memory that stands still,
step sizes from the values of their maps, and the places that attention sees.

A segment waits for the one before it, so that time goes into the number of launches. All compute in fp32 (products of queries in
bf16 take their factors in bf16) and give what PyTorch gives that stands beside them. First derivatives only. Importing this needs
no Triton; calling a kernel does.
"""

from __future__ import annotations

from torch import Tensor


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


def places(made: Tensor, cosine: Tensor, sine: Tensor, k: Tensor, v: Tensor, front: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values of the prefix, of what was recalled and of the tokens, one behind the other.

    Args:
        made: (N, T, 2, H, D), keys (not turned) and values that were recalled.  cosine, sine: (N or 1, T, 1, D), their turn.
        k, v: (N, T, H, D), of the tokens.
        front: (n, 2, H, D), keys and values of the prefix: keys are then (.., 2 D) as `mixers.attention.softmax_read` says, 0 where
            they have no part.

    Returns:
        (N, n + 2 T, H, D or 2 D), (N, n + 2 T, H, D), in the type of `made`.
    """
    from proteus_lm.ops.triton_mac._places import Places

    return Places.apply(made, cosine, sine, k, v, front)
