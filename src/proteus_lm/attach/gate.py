"""The gate of one foreign layer: what its hooks note before a forward, and what it does to the rule's call.

With a memory that starts at zero and true positions, masking k alone after its normalisation is exact for key rows, and v alone for
value columns (spec/linear.md 2.3, 2.4). So a gate touches one call: that of the layer's rule. In the rule's place in its module
stands a `Doorkeeper`, which passes every call on as it is unless it comes from a gated layer's forward.
"""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from proteus_lm.activation import Activation
from proteus_lm.attach.layers import Layer, forward_of
from proteus_lm.attach.positions import POSITIONS
from proteus_lm.mixers.norm import l2_normalize
from proteus_lm.schedule import ActivationSchedule

_NORM = "use_qk_l2norm_in_kernel"
_CACHES = ("cache", "cache_params", "past_key_values")  # the names of transformers 5.24, 5.17 and of fla


_KEYWORD = "proteus_call"  # what a layer of transformers hands on to its rule with its other keywords


class _Thread(threading.local):
    """The forward under way in this thread, for layers of fla, which hand nothing on to their rule."""

    def __init__(self) -> None:
        self.call: Call | None = None


_thread = _Thread()


@torch.compiler.disable()  # compiled code loses what it writes to a thread's own data; fla's rules end the graph anyway
def _begin(call: Call | None) -> None:
    _thread.call = call


@torch.compiler.disable()
def _under_way() -> Call | None:
    return _thread.call


@dataclass
class Call:
    """One forward of a gated layer: what the rule's call needs to know of its tokens.

    Args:
        gate: the layer's.
        start: tokens already seen, int64 (rows,); None for none.
        mask: real tokens of a padded batch, (B, T); None where all are.
        length: T, tokens in a row.
        packed: boundaries of the documents in one row, (documents + 1,), or None.
    """

    gate: LayerGate
    start: Tensor | None
    mask: Tensor | None
    length: int
    packed: Tensor | None
    used: bool = False

    def active(self, length: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
        """Open coordinates at each token as the rule sees them: int64 (B, T), or (1, T) where all rows agree.

        `cu_seqlens` is what the rule is given: fla's layers take padding out first, and then the rows are its documents.
        """
        schedule, dim = self.gate.schedule, self.gate.dim
        if cu_seqlens is not None:
            return Activation(schedule, dim, length, offset=self.start, cu_seqlens=cu_seqlens, device=device).active
        # A padded token stands where the last real token before it stood, so that positions never fall.
        positions = torch.arange(length, device=device)[None] if self.mask is None else self.mask.long().cumsum(-1) - 1
        return schedule.active(dim, positions if self.start is None else positions + self.start[:, None])

    def end(self) -> Tensor:
        """Tokens seen after this forward, int64 (rows,)."""
        assert self.start is not None
        if self.packed is not None:
            return self.start + self.packed.diff().to(self.start)
        return self.start + (self.length if self.mask is None else self.mask.long().sum(-1))


class LayerGate:
    """The schedule of one layer, in place on it from `install` to `remove`.

    Args:
        name: of the layer in its model, for messages.
        layer: what is known of its class.
        dim: coordinates of the gated axis (a head's key or value size).
        schedule: when they open.
        axis: "key" or "value".
        norm_order: "norm_then_mask" or "mask_then_norm".
        paired: coordinates i and i + dim/2 are a rotary pair and open together, pair by pair.
    """

    def __init__(
        self,
        name: str,
        layer: Layer,
        dim: int,
        schedule: ActivationSchedule,
        axis: str,
        norm_order: str,
        paired: bool,
    ) -> None:
        self.name, self.layer, self.dim = name, layer, dim
        self.schedule, self.axis, self.norm_order = schedule, axis, norm_order
        self.paired = paired
        self.names: tuple[str, ...] = ()
        self.handles: list[Any] = []

    def install(self, module: nn.Module) -> None:
        """Hook the layer, and set a doorkeeper before each of its rules (once for all layers of a module)."""
        forward = forward_of(module)
        self.names = tuple(inspect.signature(forward).parameters)[1:]
        for rule in self.layer.rules:
            if not isinstance(forward.__globals__[rule], Doorkeeper):
                forward.__globals__[rule] = Doorkeeper(forward.__globals__[rule], self.layer)
        self.handles = [
            module.register_forward_pre_hook(self.before, with_kwargs=True),
            module.register_forward_hook(self.after, with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off. The doorkeepers stay and let everything pass."""
        for handle in self.handles:
            handle.remove()

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        given = dict(zip(self.names, args)) | kwargs
        return given, next((given[name] for name in _CACHES if given.get(name) is not None), None)

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Note the positions of the tokens to come. Raises ValueError or TypeError where they cannot be known."""
        given, cache = self._given(args, kwargs)
        hidden, mask = given["hidden_states"], given.get("attention_mask")
        packed = given.get("cu_seq_lens_q" if self.layer.cache == "hf" else "cu_seqlens")
        rows, length = hidden.shape[:2]
        if mask is not None:
            if mask.dim() != 2 or len(mask) != rows or mask.shape[1] < length:
                raise ValueError(
                    f"{self.name} is given an attention mask of shape {tuple(mask.shape)} for {rows} rows of {length} tokens; "
                    f"a gated layer needs (rows, tokens) to tell padding from tokens"
                )
            mask = mask[:, mask.shape[1] - length :]
        start = None
        if cache is not None:
            documents = rows if packed is None else len(packed) - 1
            start = POSITIONS[self.layer.cache].start(cache, module.layer_idx, documents, hidden.device)
        call = Call(self, start, mask, length, packed)
        if self.layer.cache == "fla":
            _begin(call)
        return args, kwargs | {_KEYWORD: call}

    def after(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Count the tokens. Raises RuntimeError when the forward went another way than through its rule."""
        if self.layer.cache == "fla":
            _begin(None)
        if output is None:  # the forward raised
            return
        call = kwargs[_KEYWORD]
        if not call.used:
            raise RuntimeError(
                f"{self.name} did not call any of {', '.join(self.layer.rules)}: something replaced its forward (a kernel from the "
                f"hub for the whole layer?), and its memory was not gated. Load the model without it (use_kernels=False), or detach"
            )
        cache = self._given(args, kwargs)[1]
        if cache is not None:
            POSITIONS[self.layer.cache].store(cache, module.layer_idx, call.end())

    def masked(self, call: Call, values: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the rule's call, gated."""
        if call.used:
            raise RuntimeError(f"{self.name} called its rule twice in one forward; its tokens' positions are known for one call")
        if values.get("cp_context") is not None:
            raise ValueError(
                f"{self.name} is context parallel: a rank does not know its tokens' positions; run it whole, or detach"
            )
        call.used = True
        query, key, value = self.layer.arguments
        gated = value if self.axis == "value" else key
        x = values[gated]
        open_ = self._rank(x.device) < call.active(x.shape[1], values.get("cu_seqlens"), x.device)[..., None, None]
        values = dict(values)
        if self.axis == "value":
            values[value] = torch.where(open_, x, 0)
            return values
        if self.norm_order == "mask_then_norm":
            for name in (query, key, *self.layer.partners):
                values[name] = torch.where(open_, values[name], 0)
            return values
        if values.get(_NORM):
            for name in (query, key, *self.layer.partners):
                values[name] = l2_normalize(values[name])
            values[_NORM] = False
        values[key] = torch.where(open_, values[key], 0)
        return values

    def _rank(self, device: torch.device) -> Tensor:
        """The place of each coordinate in the order of opening, int64 (dim,): their own order, or rotary pairs side by side."""
        rank = torch.arange(self.dim, device=device)
        if not self.paired:
            return rank
        half = self.dim // 2
        return torch.where(rank < half, 2 * rank, 2 * (rank - half) + 1)


class Doorkeeper:
    """Stands for a rule in its module: gates the call of a gated layer, and passes any other on as it is.

    Args:
        rule: the function it stands for.
        layer: what is known of the layers that call it.
    """

    def __init__(self, rule: Any, layer: Layer) -> None:
        self.rule, self.arguments, self.handed = rule, layer.arguments, layer.cache == "hf"
        self.__doc__ = getattr(rule, "__doc__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The rule's own arguments and results."""
        call = kwargs.pop(_KEYWORD, None) if self.handed else _under_way()
        if call is None:
            return self.rule(*args, **kwargs)
        names = self.arguments[: len(args)]
        values = call.gate.masked(call, dict(zip(names, args)) | kwargs)
        # Positional stays positional: the function behind may have other names for them (q, k, v).
        positional = [values.pop(name) for name in names]
        return self.rule(*positional, **values)
