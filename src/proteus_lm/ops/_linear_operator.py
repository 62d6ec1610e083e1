"""The chunk form as one operator that torch.compile does not look into, and its gradient as another.

What it does depends on where blocks open, which is data to it: a new position needs no new compilation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proteus_lm.ops._linear_chunk import Delta, Hebbian, Tiles
from proteus_lm.ops._linear_tiles import Bucket, Group, Layout, add_tiles, split_tiles

# What each rule takes, in the order of the operator's list.
_COMMON = ("state", "q", "k", "v", "g")
INPUTS = {
    "retention": _COMMON,
    "swla": (*_COMMON, "gamma", "window_k", "window_v"),
    "gated_delta_rule": (*_COMMON, "beta"),
    "comba": (*_COMMON, "beta", "p"),
}


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """fp64 if a tensor is, fp32 otherwise, whatever the autocast."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


class _Rows(NamedTuple):
    """A call as rows (N, L, ...), keys and values behind their window of `lead` tokens (N, lead + L, ...)."""

    rule: str
    tensors: dict[str, Tensor]
    lead: int
    key_axis: bool
    pre: bool
    scale: float
    dtype: torch.dtype

    def take(self, bucket: Bucket) -> _Rows:
        """The rows of one bucket, longest first."""
        if bucket.rows is None:
            return self
        index = torch.tensor(bucket.rows, device=self.tensors["q"].device)
        return self._replace(tensors={name: x[index] for name, x in self.tensors.items()})

    def open(self, name: str, x: Tensor, group: Group) -> Tensor:
        """View of the open coordinates of (..., K), (..., V) or the state (N, H, K, V), the latter of the group's rows only."""
        if name == "state":
            return x[: group.rows, :, : group.width] if self.key_axis else x[: group.rows, ..., : group.width]
        return x[..., : group.width] if name in (("q", "k", "p") if self.key_axis else ("v", "out")) else x

    def leading(self, name: str) -> int:
        """Tokens of an earlier call that stand before the first one."""
        return self.lead if name in ("k", "v") else 0

    def tiles(self, group: Group) -> Tiles:
        """A group's tokens, their open coordinates only."""
        names = [n for n in Tiles._fields if n in self.tensors]
        parts = {n: split_tiles(self.open(n, self.tensors[n], group), group, self.dtype, self.leading(n)) for n in names}
        return Tiles(**parts)

    def form(self, group: Group) -> Hebbian:
        """The chunk form of the rule for a group."""
        if "beta" in self.tensors:
            return Delta(self.tiles(group), self.pre, decayed=self.rule == "gated_delta_rule")
        return Hebbian(self.tiles(group), self.pre)


def _rows(layout: Layout, tensors: Sequence[Tensor], rule: str, key_axis: bool, pre: bool, scale: float) -> _Rows:
    dtype = compute_dtype(*tensors)
    named = dict(zip(INPUTS[rule], tensors))
    rows = {n: x if n in ("state", "window_k", "window_v") else layout.rows(x) for n, x in named.items()}
    lead = 0
    if rule == "swla":
        lead = rows["window_k"].shape[1]
        for name in ("k", "v"):
            window = rows.pop(f"window_{name}")
            rows[name] = torch.cat((window.to(dtype), rows[name].to(dtype)), 1)
    return _Rows(rule, rows, lead, key_axis, pre, scale, dtype)


def _layout(tensors: Sequence[Tensor], active: Tensor | None, cu_seqlens: Tensor | None, key_axis: bool, size: int) -> Layout:
    q, v = tensors[1], tensors[3]
    return Layout(q, active, cu_seqlens, (q if key_axis else v).shape[-1], size)


def _put(whole: Tensor, part: Tensor, bucket: Bucket) -> Tensor:
    """A bucket's rows where they belong."""
    if bucket.rows is None:
        return part
    whole[bucket.rows] = part
    return whole


def _scan(rows: _Rows, groups: Sequence[Group], state: Tensor, out: Tensor | None = None) -> list[Tensor]:
    """Carry `state` through the groups, in place. Writes outputs to `out`, or else returns the state each group starts from."""
    starts = []
    for group in groups:
        form, part = rows.form(group), rows.open("state", state, group)
        start = part.flatten(0, 1)
        if out is None:
            starts.append(start.clone())
        part.copy_(form.scan(start).view(part.shape))
        if out is not None:
            add_tiles(rows.open("out", out, group), form.read(rows.scale), group)
    return starts


@torch.library.custom_op("proteus_lm::linear_chunk", mutates_args=())
def linear_chunk(
    tensors: Sequence[Tensor],
    active: Tensor | None,
    cu_seqlens: Tensor | None,
    rule: str,
    key_axis: bool,
    pre: bool,
    scale: float,
    size: int,
) -> tuple[Tensor, Tensor]:
    """A linear rule over all tokens.

    Args:
        tensors: those that `INPUTS` names for the rule; state (N, H, K, V), window_k and window_v (N, c - 1, H, K or V).
        active: int (1, T) or (B, T), open coordinates at each token; None: all.
        cu_seqlens: (N + 1,) with B = 1, or None.
        pre: read the state before the token's own write.
        size: tokens in a tile, at most.

    Returns:
        out (B, T, H, V) in v's type, the state behind each row's last token (N, H, K, V) in the type computed in.
    """
    v = tensors[3]
    layout = _layout(tensors, active, cu_seqlens, key_axis, size)
    with torch.autocast(v.device.type, enabled=False):
        call = _rows(layout, tensors, rule, key_axis, pre, scale)
        state = call.tensors["state"].to(call.dtype, copy=True)
        out = v.new_zeros(layout.count, layout.length, *v.shape[2:])
        for bucket in layout.buckets:
            rows = call.take(bucket)
            part = state if bucket.rows is None else state[bucket.rows]
            part_out = out if bucket.rows is None else torch.zeros_like(out[bucket.rows])
            _scan(rows, bucket.groups, part, out=part_out)
            state, out = _put(state, part, bucket), _put(out, part_out, bucket)
    return layout.tokens(out), state


@linear_chunk.register_fake
def _(tensors, active, cu_seqlens, rule, key_axis, pre, scale, size):  # noqa: ANN001
    return torch.empty_like(tensors[3], memory_format=torch.contiguous_format), tensors[0].new_empty(
        tensors[0].shape, dtype=compute_dtype(*tensors)
    )


@torch.library.custom_op("proteus_lm::linear_chunk_backward", mutates_args=())
def linear_chunk_backward(
    d_out: Tensor,
    d_state: Tensor,
    tensors: Sequence[Tensor],
    active: Tensor | None,
    cu_seqlens: Tensor | None,
    rule: str,
    key_axis: bool,
    pre: bool,
    scale: float,
    size: int,
) -> list[Tensor]:
    """Gradients with respect to `tensors`, from those of the outputs and of the last states. Only the inputs are kept
    from the forward pass: the scan runs again here, and little more than one group's tensors exist at a time.
    """
    layout = _layout(tensors, active, cu_seqlens, key_axis, size)
    with torch.autocast(d_out.device.type, enabled=False):
        call = _rows(layout, tensors, rule, key_axis, pre, scale)
        d_rows = layout.rows(d_out)
        grads = {n: torch.zeros_like(x, dtype=call.dtype, memory_format=torch.contiguous_format) for n, x in call.tensors.items()}
        grads["state"] = d_state.to(call.dtype, copy=True)
        for bucket in layout.buckets:
            rows = call.take(bucket)
            part = rows._replace(tensors=grads).take(bucket).tensors
            _backward_bucket(rows, bucket, d_rows if bucket.rows is None else d_rows[bucket.rows], part)
            grads = {n: _put(x, part[n], bucket) for n, x in grads.items()}
    if rule == "swla":
        for name in ("k", "v"):
            grads[f"window_{name}"] = grads[name][:, : call.lead].clone()
            grads[name] = grads[name][:, call.lead :].clone()
    named = zip(INPUTS[rule], tensors)
    outputs = (grads[n] if n in ("state", "window_k", "window_v") else layout.tokens(grads[n]) for n, _ in named)
    return [g.to(x.dtype) for g, x in zip(outputs, tensors)]


def _backward_bucket(rows: _Rows, bucket: Bucket, d_out: Tensor, grads: dict[str, Tensor]) -> None:
    """Add a bucket's gradients to `grads`, whose "state" goes in as that of the last states and comes out as that of the first."""
    starts = _scan(rows, bucket.groups, rows.tensors["state"].to(rows.dtype, copy=True))
    for group in reversed(bucket.groups):
        form = rows.form(group)
        form.scan(starts.pop())
        d_state = rows.open("state", grads["state"], group)
        d_tiles = split_tiles(rows.open("out", d_out, group), group, rows.dtype) * rows.scale
        d_before, d_inputs = form.backward(d_tiles, d_state.flatten(0, 1))
        d_state.copy_(d_before.view(d_state.shape))
        for name, tiles in zip(Tiles._fields, d_inputs):
            if tiles is not None:
                add_tiles(rows.open(name, grads[name], group), tiles, group, rows.leading(name))


@linear_chunk_backward.register_fake
def _(d_out, d_state, tensors, active, cu_seqlens, rule, key_axis, pre, scale, size):  # noqa: ANN001
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, active, cu_seqlens, *ctx.choices = inputs
    ctx.save_for_backward(active, cu_seqlens, *tensors)


def _backward(ctx: Any, d_out: Tensor, d_state: Tensor) -> tuple[Any, ...]:
    active, cu_seqlens, *tensors = ctx.saved_tensors
    grads = linear_chunk_backward(d_out, d_state, tensors, active, cu_seqlens, *ctx.choices)
    return grads, *[None] * 7


linear_chunk.register_autograd(_backward, setup_context=_setup_context)
