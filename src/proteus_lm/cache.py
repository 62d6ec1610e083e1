"""What a model carries from one call to the next, behind the interface that transformers' `generate` asks for.

The states are our own NamedTuples of tensors; transformers' `Cache` is a thin coat, the only part that its releases can break.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import Cache

from proteus_lm.mixers.state import map_state, named_state, named_tensors
from proteus_lm.schedule import ActivationSchedule

if TYPE_CHECKING:
    from proteus_lm.model import ProteusForCausalLM

POSITION = "position"


def _named(states: list[Any]) -> dict[str, Tensor]:
    """The tensors of all layers' states, in order, by name."""
    return named_tensors(tuple(states), "layers.")


def unlock_positions(schedule: ActivationSchedule) -> list[int]:
    """Where the blocks of a memory open."""
    return [schedule.unlock_position(block) for block in range(schedule.blocks)]


class ProteusCache(Cache):
    """Mixer states of every layer and the position of every row.

    A forward replaces `states` and `position` by new tensors and never writes into the old ones, so `copy` costs nothing.

    Args:
        states: one a layer, rows first; None before the first token.
        position: int64 (N,), tokens that each row's document has had so far (masked ones do not count); None likewise.
        seen: columns that `generate` has fed, masked ones included.
        schedule: by which the states were made; None likewise.
    """

    def __init__(
        self,
        states: list[Any] | None = None,
        position: Tensor | None = None,
        seen: int = 0,
        schedule: ActivationSchedule | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.states, self.position, self.seen, self.schedule = states, position, seen, schedule

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
        return sum(x.numel() for x in _named(self.states or []).values())

    def copy(self) -> ProteusCache:
        """A cache that later forwards through this one do not change."""
        return self._mapped(lambda x: x)

    def detach(self) -> ProteusCache:
        """The same values cut from the graph: training goes on from here, gradients do not go back (truncated backpropagation)."""
        return self._mapped(lambda x: x.detach())

    def reorder(self, rows: Tensor) -> ProteusCache:
        """A cache of the rows `rows` (int64, any number, repeats allowed)."""
        return self._mapped(lambda x: x.index_select(0, rows.to(x.device)))

    def save(self, path: str | Path, model: ProteusForCausalLM) -> None:
        """Write it to a safetensors file, whole or not at all: the memory of these rows' documents, on its own.

        The file holds `model.fingerprint()`, for it means nothing to other weights.

        Args:
            path: of the file.
            model: the one that filled the cache.

        Raises:
            ValueError: for an empty cache, or one that a model with another schedule filled.
        """
        if self.states is None or self.position is None or self.schedule is None:
            raise ValueError("an empty cache holds nothing to save; run the model with it first")
        self.check_schedule(model.schedule)
        named = {POSITION: self.position} | _named(self.states)
        tensors = {name: x.detach().cpu().contiguous() for name, x in named.items()}
        about = {"model": model.fingerprint(), "seen": str(self.seen), "unlocks": json.dumps(unlock_positions(self.schedule))}
        path = Path(path)
        new = path.with_name(path.name + ".new")
        save_file(tensors, new, metadata=about)
        os.replace(new, path)

    @classmethod
    def load(cls, path: str | Path, model: ProteusForCausalLM) -> ProteusCache:
        """A cache that `save` wrote, on the device of `model`, which must be the model that filled it.

        Raises:
            ValueError: for a file that is not such a cache or is damaged, of another model (with both fingerprints), or of another
                schedule.
            FileNotFoundError: where there is none.
        """
        try:
            return cls._load(path, model)
        except SafetensorError as error:
            raise ValueError(
                f"{path} cannot be read as a saved ProteusCache: {error}; it is damaged or cut short, or no safetensors file: "
                "copy it anew, or run the model over the tokens again and save its cache"
            ) from error

    @classmethod
    def _load(cls, path: str | Path, model: ProteusForCausalLM) -> ProteusCache:
        with safe_open(path, "pt", device=str(model.device)) as file:
            about = file.metadata() or {}
            if not {"model", "seen", "unlocks"} <= about.keys():
                raise ValueError(f"{path} is no saved ProteusCache: its metadata has {', '.join(sorted(about)) or 'nothing'}")
            mine = model.fingerprint()
            if about["model"] != mine:
                raise ValueError(
                    f"{path} holds what the model {about['model']} remembers; this model is {mine}. A memory means nothing to "
                    "other weights: load it with the model that made it (same parameters, configuration and type)"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        position = tensors.pop(POSITION)
        states = named_state({n.removeprefix("layers."): x for n, x in tensors.items()}, tuple(model.initial_states(len(position))))
        found = cls(list(states), position, int(about["seen"]), model.schedule)
        unlocks = json.loads(about["unlocks"])
        if unlocks != unlock_positions(model.schedule):
            raise ValueError(_other_schedule(unlocks, unlock_positions(model.schedule)))
        return found

    def check_schedule(self, schedule: ActivationSchedule) -> None:
        """Raise ValueError unless the states were made by `schedule`: a block that was open cannot be locked again."""
        if self.schedule is not None and self.schedule is not schedule and self.schedule != schedule:
            raise ValueError(_other_schedule(unlock_positions(self.schedule), unlock_positions(schedule)))

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> ProteusCache:
        if self.states is None or self.position is None:
            return ProteusCache(seen=self.seen)
        return ProteusCache([map_state(change, state) for state in self.states], change(self.position), self.seen, self.schedule)

    def _become(self, other: ProteusCache) -> None:
        self.states, self.position = other.states, other.position
        self.seen, self.schedule = other.seen, other.schedule

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


def _other_schedule(theirs: list[int], mine: list[int]) -> str:
    return (
        f"the cache was filled while blocks of memory opened at {theirs}, and the model opens them at {mine}: a document keeps one "
        "schedule; start with an empty cache, or give set_context the length the cache was filled with"
    )
