"""`--memory-policy stretch --memory-context LENGTH`: a trained memory opened over another length (docs/policies.md)."""

from __future__ import annotations

from copy import copy
from typing import Annotated, Any, Literal

import tyro

from proteus_lm.cli.common import token_counts

MemoryPolicy = Literal["stretch"]
MemoryContext = Annotated[str | None, tyro.conf.arg(metavar="LENGTH")]


def spread(model: Any, policy: MemoryPolicy | None, context: str | None) -> None:
    """Open the blocks of `model` evenly over `context` tokens (4096, 4K ...) instead of its training context; None: as trained.

    Without a policy the model's own must be "stretch".

    Raises:
        ValueError: for a policy without a context, a model without blocks to open, or one whose blocks open at given positions.
    """
    if context is None:
        if policy is not None:
            raise ValueError(f"--memory-policy {policy} changes nothing by itself; say over what length with --memory-context")
        return
    lengths = token_counts([context]) or ()
    if len(lengths) != 1:
        raise ValueError(f"--memory-context {context} is {len(lengths)} lengths; give one")
    config = model.config
    if getattr(config, "model_type", "") != "proteus":
        raise ValueError("--memory-context is of the models of this package: this one has no blocks of memory to open")
    if policy is not None and config.memory_policy != policy:
        if config.memory_unlocks is not None:
            raise ValueError(
                f"--memory-policy {policy}: blocks open at the positions {list(config.memory_unlocks)}, which were given "
                f"(memory_policy {config.memory_policy!r}); only evenly opened ones can be stretched"
            )
        changed = copy(config)
        changed.memory_policy = policy
        changed.check()  # refuses models without a memory, or with one block
        model.config = changed
    elif config.memory_policy != "stretch":
        raise ValueError(
            f"--memory-context {context} opens the blocks elsewhere than in training; say so with --memory-policy stretch"
        )
    model.set_context(lengths[0])
