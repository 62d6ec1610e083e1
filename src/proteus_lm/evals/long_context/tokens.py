"""Many texts to tokens at once, as the model's tokenizer gives them one by one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any


def encode_all(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, with the special tokens that the tokenizer puts around a prompt: what `tokenizer.encode` gives.

    Fast tokenizers do it in parallel, and without the offsets that cost half of the time.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [list(tokenizer.encode(text)) for text in texts]
    backend.no_truncation()  # an earlier call may have left them on; transformers sets them at each call of its own
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=True)]


def count_tokens(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Tokens of each text, as `encode_all` gives them."""
    return [len(ids) for ids in encode_all(tokenizer, texts)]


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 (hex) of what a transformers tokenizer's ids depend on."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str()) | {"truncation": None, "padding": None}  # calls change these two
        if tokenizer.split_special_tokens:
            content["split_special_tokens"] = True
    else:
        content = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
