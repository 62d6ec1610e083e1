"""TEMPORARY until the operations land: the reference, and its one-token call as the step."""

from __future__ import annotations

try:
    from proteus_lm.ops.deep import titans_memory, titans_weights
    from proteus_lm.ops.delta import comba
except ImportError:
    pass
from proteus_lm.ops.reference import comba as _comba
from proteus_lm.ops.reference import titans_memory as _titans_memory

try:
    from proteus_lm.ops.recurrent import comba_step
except ImportError:
    import torch

    class _A:
        def __init__(self, active, dim):
            self.active = active[:, None]
            self.dim = dim

        def mask(self):
            return torch.arange(self.dim) < self.active[..., None]

    def comba_step(q, k, v, p, g, beta, state, *, active=None, axis="key", scale=None):
        a = None if active is None else _A(active, q.shape[-1] if axis == "key" else v.shape[-1])
        o, s = _comba(
            *(x[:, None] for x in (q, k, v, p, g, beta)),
            activation=a,
            axis=axis,
            scale=scale,
            initial_state=state,
            output_final_state=True,
        )
        return o[:, 0], s


try:
    from proteus_lm.ops.deep_step import titans_step
except ImportError:
    import torch

    class _B:
        def __init__(self, active, offset):
            self.active = active[:, None]
            self.offset = offset

    def titans_step(q, k, v, theta, alpha, eta, state, *, active=None, read="post", memory_activation="gelu_tanh"):
        a = None if active is None else _B(active, state.position)
        y, s = _titans_memory(
            *(x[:, None] for x in (q, k, v, theta, alpha, eta)),
            state.weights,
            chunk=state.k.shape[1],
            read=read,
            memory_activation=memory_activation,
            activation=a,
            initial_state=state,
            output_final_state=True,
        )
        return y[:, 0], s
