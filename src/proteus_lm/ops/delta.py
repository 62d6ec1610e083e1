"""Rules that write the error of a read: the delta rule, its gated form, and Comba.

Arguments and results that all linear rules share are described at `proteus_lm.ops.hebbian.retention`.
"""

from __future__ import annotations

from torch import Tensor

from proteus_lm.activation import Activation
from proteus_lm.ops import _linear


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    activation: Activation | None = None,
    axis: str = "key",
    scale: float | None = None,
    read: str = "post",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet's memory (spec/linear.md 1.2):

        S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T,    o_t = scale S_t^T q_t

    in the open coordinates; for a stable memory keys have norm 1 at most (the caller's).

    Args:
        beta: (B, T, H), strength of the write, in [0, 1], or to 2 for negative eigenvalues.
        others: see `retention`.

    Returns:
        out (B, T, H, V) in v's type; the state (N, H, K, V) in fp32 or fp64, or None.

    Raises:
        ValueError, TypeError: as `retention`.
    """
    return _linear.run(
        *("delta_rule", (q, k, v, beta), activation, axis, scale, read),
        *(initial_state, cu_seqlens, output_final_state, backend),
    )


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    activation: Activation | None = None,
    axis: str = "key",
    scale: float | None = None,
    read: str = "post",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet's memory (spec/linear.md 1.5):

        S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T,    o_t = scale S_t^T q_t

    The error is against the decayed state.

    Args:
        g: (B, T, H), log of the decay, at most 0.
        beta: (B, T, H), strength of the write, in [0, 1], or to 2 for negative eigenvalues.
        others: see `retention`.

    Returns:
        out (B, T, H, V) in v's type; the state (N, H, K, V) in fp32 or fp64, or None.

    Raises:
        ValueError, TypeError: as `retention`.
    """
    return _linear.run(
        *("gated_delta_rule", (q, k, v, g, beta), activation, axis, scale, read),
        *(initial_state, cu_seqlens, output_final_state, backend),
    )


def comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    activation: Activation | None = None,
    axis: str = "key",
    scale: float | None = None,
    read: str = "post",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Comba's memory (spec/linear.md 1.3):

        S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T,    o_t = scale S_t^T q_t

    The error is against the state before its decay, as in its authors' code. Its output correction belongs to q (the caller's).

    Args:
        p: (B, T, H, K), what the error reads with, b k_t in Comba.
        g: (B, T, H), log of the decay, at most 0.
        beta: (B, T, H), strength of the write, in [0, 1], or to 2 for negative eigenvalues.
        others: see `retention`.

    Returns:
        out (B, T, H, V) in v's type; the state (N, H, K, V) in fp32 or fp64, or None.

    Raises:
        ValueError, TypeError: as `retention`.
    """
    return _linear.run(
        *("comba", (q, k, v, p, g, beta), activation, axis, scale, read),
        *(initial_state, cu_seqlens, output_final_state, backend),
    )
