"""What a model carries from one call to the next, behind the interface that transformers' `generate` asks for.

The states are our own NamedTuples of tensors; transformers' `Cache` is a thin coat, the only part that its releases can break.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import Cache

from proteus_lm.mixers.base import map_state

if TYPE_CHECKING:
    from proteus_lm.model import ProteusForCausalLM


def _leaves(states: list[Any]) -> list[Tensor]:
    """The tensors of all layers' states, in order."""
    found: list[Tensor] = []
    for state in states:
        map_state(lambda x: found.append(x) or x, state)
    return found


class ProteusCache(Cache):
    """Mixer states of every layer and the position of every row.

    A forward replaces `states` and `position` by new tensors and never writes into the old ones, so `copy` costs nothing.

    Args:
        states: one a layer, rows first; None before the first token.
        position: int64 (N,), tokens that each row's document has had so far (masked ones do not count); None likewise.
        seen: columns that `generate` has fed, masked ones included.
    """

    def __init__(self, states: list[Any] | None = None, position: Tensor | None = None, seen: int = 0) -> None:
        super().__init__(layers=[])
        self.states, self.position, self.seen = states, position, seen

    def __repr__(self) -> str:
        rows = "no rows" if self.position is None else f"{len(self.position)} rows"
        return f"ProteusCache({len(self)} layers, {rows}, {self.seen} columns seen)"

    def __len__(self) -> int:
        return len(self.states or ())

    @property
    def is_empty(self) -> bool:
        """Whether no forward has filled it yet."""
        return self.states is None

    @property
    def size(self) -> int:
        """Numbers held in all states and rows."""
        return sum(leaf.numel() for leaf in _leaves(self.states or []))

    def copy(self) -> ProteusCache:
        """A cache that later forwards through this one do not change."""
        return self._mapped(lambda x: x)

    def detach(self) -> ProteusCache:
        """The same values cut from the graph: training goes on from here, gradients do not go back (truncated backpropagation)."""
        return self._mapped(lambda x: x.detach())

    def reorder(self, rows: Tensor) -> ProteusCache:
        """A cache of the rows `rows` (int64, any number, repeats allowed)."""
        return self._mapped(lambda x: x.index_select(0, rows.to(x.device)))

    def save(self, path: str | Path) -> None:
        """Write it to a safetensors file, whole or not at all.

        Raises:
            ValueError: for an empty cache.
        """
        if self.states is None or self.position is None:
            raise ValueError("an empty cache holds nothing to save; run the model with it first")
        leaves = [self.position, *_leaves(self.states)]
        tensors = {f"{i:05d}": leaf.detach().cpu().contiguous() for i, leaf in enumerate(leaves)}
        path = Path(path)
        new = path.with_name(path.name + ".new")
        save_file(tensors, new, metadata={"seen": str(self.seen)})
        os.replace(new, path)

    @classmethod
    def load(cls, path: str | Path, model: ProteusForCausalLM) -> ProteusCache:
        """A cache that `save` wrote, on the device of `model`, which must be of the same configuration.

        Raises:
            ValueError: when the states are not those of this model.
        """
        with safe_open(path, "pt", device=str(model.device)) as file:
            leaves = [file.get_tensor(name) for name in sorted(file.keys())]
            seen = int(file.metadata()["seen"])
        position, leaves = leaves[0], leaves[1:]
        wanted = model.initial_states(len(position))
        shapes = [[tuple(x.shape) for x in side] for side in (leaves, _leaves(wanted))]
        if len(shapes[0]) != len(shapes[1]) or any(a[2:] != b[2:] or a[0] != b[0] for a, b in zip(*shapes)):
            raise ValueError(
                f"{path} holds {shapes[0]}, the states of this model are {shapes[1]}; load it with the model that made it"
            )
        rest = iter(leaves)
        return cls([map_state(lambda _: next(rest), state) for state in wanted], position, seen)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> ProteusCache:
        if self.states is None or self.position is None:
            return ProteusCache(seen=self.seen)
        return ProteusCache([map_state(change, state) for state in self.states], change(self.position), self.seen)

    def _become(self, other: ProteusCache) -> None:
        self.states, self.position, self.seen = other.states, other.position, other.seen

    # What transformers asks for.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns fed so far, padding included: `generate` cuts what is new from a whole sequence by it."""
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older releases

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns of a mask over past and new tokens, and where it starts."""
        return self.seen + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take these rows in place (beam search)."""
        self._become(self.reorder(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row in place."""
        if self.position is not None:
            rows = torch.arange(len(self.position), device=self.position.device).repeat_interleave(repeats)
            self._become(self.reorder(rows))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows in place."""
        self._become(self.reorder(indices))

    def reset(self) -> None:
        """Forget everything."""
        self._become(ProteusCache())

    def crop(self, tokens_to_remove: int) -> None:
        """Not possible: a memory cannot take back what was written.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "a ProteusCache cannot be cropped: a memory does not keep the tokens it was made of; keep `cache.copy()` from before "
            "them (assisted decoding, which crops, does not work with these models)"
        )

    @property
    def batch_size(self) -> int:
        """Rows, -1 before the first forward."""
        return -1 if self.position is None else len(self.position)

    @property
    def is_compileable(self) -> bool:
        """`generate` shall not compile by itself."""
        return False

    @property
    def is_croppable(self) -> bool:
        """See `crop`."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether a forward has filled it."""
        return not self.is_empty

    @property
    def is_sliding(self) -> list[bool]:
        """No layer is transformers' sliding window."""
        return [False] * max(len(self), 1)

    @property
    def is_linear(self) -> list[bool]:
        """False, so that `generate` continues from the columns after `get_seq_length`."""
        return [False] * max(len(self), 1)

    @property
    def is_dummy(self) -> list[bool]:
        """No layer is left out."""
        return [False] * max(len(self), 1)
