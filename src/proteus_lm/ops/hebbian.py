"""Rules that write values as they are: retention, and sliding-window linear attention.

Arguments and results that all linear rules share are described at `retention`; `delta.py` has those that write an error.
"""

from __future__ import annotations

from torch import Tensor

from proteus_lm.activation import Activation
from proteus_lm.ops import _linear
from proteus_lm.ops.state import SWLAState


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
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
    """RetNet's memory, and linear attention with one decay a head and token (spec/linear.md 1.1):

        S_t = e^{g_t} S_{t-1} + k_t v_t^T,    o_t = scale S_t^T q_t

    in the open coordinates; locked ones are neither read, written nor decayed, and keep their bits (Proteus eq 7-11).
    Computed in fp32, or fp64 if an input is, whatever the autocast. Gradients reach every tensor, the initial state included.

    Args:
        q, k: (B, T, H, K), any floating type, as every tensor here. Normalisation is the caller's.
        v: (B, T, H, V).
        g: (B, T, H), log of the decay, at most 0.
        activation: open coordinates of each token, of K for `axis="key"` and of V for `axis="value"`; None: all are open.
        axis: "key" opens rows of S, "value" columns.
        scale: of the outputs; K ** -0.5 of the whole K if None.
        read: "post" reads S_t, "pre" S_{t-1}, without the token's own write and decay (Proteus eq 11 to the letter); both in the
            coordinates that are open at t.
        initial_state: (N, H, K, V), N = B, or the number of documents with `cu_seqlens`; None: zeros.
        cu_seqlens: int (N + 1,), boundaries of the documents packed in one row (B = 1); the state starts anew at each.
        output_final_state: return the state behind the last token (of each document) too.
        backend: "auto", "triton", "fla", "chunk" (batched over tiles of tokens) or "reference" (token by token); docs/kernels.md.

    Returns:
        out (B, T, H, V) in v's type; the state (N, H, K, V) in fp32 or fp64, or None.

    Raises:
        ValueError: for shapes, devices, an axis, a backend, an activation or boundaries that do not fit each other.
        TypeError: for a tensor that is not floating, or the state of another rule.
    """
    return _linear.run(
        *("retention", (q, k, v, g), activation, axis, scale, read),
        *(initial_state, cu_seqlens, output_final_state, backend),
    )


def swla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    gamma: Tensor,
    *,
    activation: Activation | None = None,
    axis: str = "key",
    scale: float | None = None,
    read: str = "post",
    initial_state: Tensor | SWLAState | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, SWLAState | None]:
    """Sliding-window linear attention: each token writes the last c pairs again (Atlas eq 20; spec/linear.md 1.4, 2.8):

        S_t = e^{g_t} S_{t-1} + sum_{j < c} gamma_{t,j} k_{t-j} v_{t-j}^T,    o_t = scale S_t^T q_t

    A write opens what is open at its own time t: a pair that came before an unlock is written into the new block behind it.

    Args:
        gamma: (B, T, H, c), weight of token t - j at write time t; c >= 1.
        initial_state: an `SWLAState`, or its matrix alone for an empty window.
        others: see `retention`.

    Returns:
        out (B, T, H, V) in v's type; the `SWLAState` behind the last token (of each document), or None.

    Raises:
        ValueError, TypeError: as `retention`.
    """
    return _linear.run(
        *("swla", (q, k, v, g, gamma), activation, axis, scale, read),
        *(initial_state, cu_seqlens, output_final_state, backend),
    )
