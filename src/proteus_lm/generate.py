"""From a prompt to text: the model's own `generate`, the run's tokenizer, and a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


class Text(Protocol):
    """What generation needs of a tokenizer: `proteus_lm.data.tokenizer.Tokenizer`."""

    eos_id: int

    def encode(self, text: str, /) -> np.ndarray:
        """Ids of a text, integers (tokens,)."""
        ...

    def decode(self, ids: Any, /, *, skip_special_tokens: bool = False) -> str:
        """Text of ids."""
        ...


@dataclass(frozen=True)
class Sampling:
    """How text is drawn.

    Args:
        max_new_tokens: at most so many; the end-of-document token stops earlier.
        temperature: 0 takes the likeliest token each time.
        top_k: draw among so many likeliest tokens, None = all.
        top_p: draw among the likeliest tokens that hold this probability together, None = all.
        seed: of the draw; the same seed, prompt, model and thread count give the same text.
        num_beams: beams of a beam search, 1 = none; needs temperature 0.

    Raises:
        ValueError: for a value outside its rule, or beams with a temperature.
    """

    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    num_beams: int = 1

    def __post_init__(self) -> None:
        rules = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (self.temperature >= 0, "0 (the likeliest token) or more"),
            "top_k": (self.top_k is None or self.top_k >= 1, "at least 1"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            "seed": (self.seed >= 0, "0 or more"),
            "num_beams": (self.num_beams >= 1, "at least 1"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {rule}")
        if self.num_beams > 1 and self.temperature > 0:
            raise ValueError(f"a search over {self.num_beams} beams draws nothing; give temperature 0 with it, or one beam")


def generate(model: Any, tokenizer: Text, prompt: str, sampling: Sampling) -> str:
    """The text a model writes after `prompt` (without the prompt, without the end token).

    The state of PyTorch's random generators is as before afterwards.

    Raises:
        ValueError: for a prompt that gives no token, or tokens the model does not know.
    """
    ids = np.asarray(tokenizer.encode(prompt), dtype=np.int64)
    if len(ids) == 0:
        raise ValueError(f"the prompt {prompt!r} gives no token; give at least one character to go on from")
    if ids.max() >= model.config.vocab_size:
        raise ValueError(
            f"token {ids.max()} is outside the model's vocabulary of {model.config.vocab_size}; use the run's own tokenizer"
        )
    device = next(model.parameters()).device
    tokens = torch.from_numpy(ids)[None].to(device)
    options: dict[str, Any] = {"do_sample": sampling.temperature > 0, "num_beams": sampling.num_beams}
    if sampling.temperature > 0:
        # transformers' own default is top_k = 50; 0 means all tokens
        options |= {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(sampling.seed)
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=tokenizer.eos_id,
            pad_token_id=tokenizer.eos_id,
            **options,
        )
    return tokenizer.decode(out[0, len(ids) :].tolist(), skip_special_tokens=True)
