"""What an operation carries from one call to the next. Every state has a constant size, whatever the number of tokens seen.

Retention, the delta rules and Comba carry the bare matrix (N, H, K, V); the two below carry more.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SWLAState(NamedTuple):
    """Sliding-window linear attention: the matrix, and the last c - 1 pairs, which later tokens write again.

    Args:
        matrix: (N, H, K, V), with every write up to the last token.
        keys: (N, c - 1, H, K), oldest first; zeros where the document has not so many tokens yet.
        values: (N, c - 1, H, V), likewise.
    """

    matrix: Tensor
    keys: Tensor
    values: Tensor


class TitansState(NamedTuple):
    """Titans' MLP memory at the last boundary of the inner chunk, and the tokens since (the open chunk).

    Slot i of the open chunk belongs to document position position // chunk * chunk + i; a slot without a token has `active` 0.
    Weights of the current token follow from the boundary by the open rows: `ops.titans_weights`.

    Args:
        weights: the memory's matrices at the boundary, each (N, H, in, out), fp32 or wider: W1 .. WL, or of a gated memory
            ("swiglu") W1, U1, W2, U2 .. WL, as `ops.memory_activations.matrix_names` names them.
        momentum: that of each matrix, likewise.
        k: (N, chunk, H, D).  v: (N, chunk, H, Dv).  theta, alpha, eta: (N, chunk, H).
        active: int64 (N, chunk), open hidden units at each token of the open chunk, 0 for an empty slot.
        position: int64 (N,), tokens of the document seen so far, i.e. the position of the next token.
    """

    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    k: Tensor
    v: Tensor
    theta: Tensor
    alpha: Tensor
    eta: Tensor
    active: Tensor
    position: Tensor
