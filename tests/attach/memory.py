"""The gated memory as the paper prints it, for any rule, and what the tests of this folder share."""

from __future__ import annotations

import torch

BLOCKS, CONTEXT, VOCAB = 4, 24, 61
KEYS, VALUES = 18, 10  # neither is a multiple of BLOCKS: the last block takes the remainder


def tokens(rows, length, seed=1):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def close(got, want, tolerance=1e-5):
    """Root mean square of the difference against that of the values: fp32 rounding through three layers."""
    error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert error < tolerance, f"relative error {error:.2e}"


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def literal(q, k, v, decay, beta, p, active, axis, state):
    """The memory as eq 7-11 print it, token by token: locked rows or columns are neither read, written nor decayed.

    decay (B, T, H, K or 1); beta (B, T, H) or None for a Hebbian write; p: "decayed" (error of the decayed state), or what the
    error reads with (B, T, H, K).
    """
    outputs = []
    size = k.shape[-1] if axis == "key" else v.shape[-1]
    for t in range(q.shape[1]):
        mask = (torch.arange(size) < active[:, t, None])[:, None]
        mask = mask[..., None] if axis == "key" else mask[..., None, :]
        opened = torch.where(mask, state, 0)
        decayed = opened * decay[:, t, :, :, None]
        write = v[:, t]
        if beta is not None:
            reader, seen = (k[:, t], decayed) if isinstance(p, str) else (p[:, t], opened)
            write = beta[:, t, :, None] * (v[:, t] - (seen * reader[..., None]).sum(-2))
        updated = decayed + k[:, t, :, :, None] * write[:, :, None]
        state = torch.where(mask, updated, state)
        outputs.append((torch.where(mask, state, 0) * q[:, t, :, :, None]).sum(-2) * k.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), state
