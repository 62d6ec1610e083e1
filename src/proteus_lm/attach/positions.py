"""How many real tokens each row of a foreign cache has seen: kept inside the cache, so that it goes where the memory goes.

A row of the cache is a sequence of the batch, or a document where the rule keeps one state a document. Reordering (beam search),
repeating, resetting, copying and moving a cache then move the positions too, by the cache's own code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FLA_KEY = "proteus_position"


def _checked(positions: Tensor, rows: int, layer: int) -> Tensor:
    if len(positions) != rows:
        raise ValueError(
            f"layer {layer}'s cache holds positions of {len(positions)} rows and this call brings {rows}; start a new cache, "
            f"or reorder this one with its own methods"
        )
    return positions


def _strange(layer: int) -> ValueError:
    return ValueError(
        f"layer {layer}'s cache was filled before proteus_lm.attach, so that the positions of its tokens are not known; "
        f"start a new cache after attaching"
    )


class TransformersPositions:
    """Positions as one more state of transformers' `LinearAttentionLayer` (5.17 and later keep any number of states a layer)."""

    @staticmethod
    def start(cache: Any, index: int, rows: int, device: torch.device) -> Tensor:
        """Tokens that each row has seen: int64 (rows,), the cache's own tensor.

        Raises:
            TypeError: for a cache without such states.
            ValueError: for a cache filled before, one that rolls back, or another number of rows.
        """
        layer = cache.layers[index]
        if not isinstance(getattr(layer, "recurrent_states", None), dict):
            raise TypeError(
                f"layer {index}'s cache is {type(layer).__name__}, which has no numbered states to keep positions in; "
                f"use a cache of transformers 5.17 or later (DynamicCache(config=model.config))"
            )
        if layer.record_past:
            raise ValueError(
                f"layer {index}'s cache records its past to be cropped (assisted decoding); positions of a gated memory cannot be "
                f"rolled back, use plain decoding"
            )
        slot = getattr(layer, "proteus_slot", None)
        if slot is None:
            if layer.has_previous_state[0]:
                raise _strange(index)
            slot = layer.proteus_slot = layer.number_of_states
            layer.number_of_states += 1
            layer.conv_states[slot], layer.conv_kernel_size[slot] = None, None
            layer.is_conv_states_initialized[slot] = False
            layer.lazy_initialization(recurrent_states=torch.zeros(rows, dtype=torch.int64, device=device), state_idx=slot)
        layer.has_previous_state[slot] = True  # transformers asks whether all states have one; a reset clears it
        return _checked(layer.recurrent_states[slot], rows, index)

    @staticmethod
    def store(cache: Any, index: int, positions: Tensor) -> None:
        """Write positions in place: the tensor keeps its address for compiled decoding."""
        layer = cache.layers[index]
        layer.recurrent_states[layer.proteus_slot].copy_(positions)


class FlaPositions:
    """Positions as one more entry of a layer's dictionary of states in flash-linear-attention's cache."""

    @staticmethod
    def start(cache: Any, index: int, rows: int, device: torch.device) -> Tensor:
        """Tokens that each row has seen: int64 (rows,). Raises ValueError as `TransformersPositions.start`."""
        state = cache[index] if len(cache) > index else None
        if state is None or state.get("recurrent_state") is None:
            return torch.zeros(rows, dtype=torch.int64, device=device)
        if _FLA_KEY not in state:
            raise _strange(index)
        return _checked(state[_FLA_KEY], rows, index)

    @staticmethod
    def store(cache: Any, index: int, positions: Tensor) -> None:
        """Put positions beside the layer's state, which its forward has just written."""
        cache[index][_FLA_KEY] = positions


POSITIONS = {"hf": TransformersPositions, "fla": FlaPositions}
