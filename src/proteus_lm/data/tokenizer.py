"""Text to token ids and back: one mechanism (`tokenizers`) for the built-in byte tokenizer, files, folders and the hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from proteus_lm.data.files import write_json, write_text

END = "<|endoftext|>"
_KNOWN_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")
_HUB_FILES = ["tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "*.model", "config.json"]
# What plays no part in text -> ids here: nothing is cut or padded, and no special token is put around a text.
_UNUSED = ("truncation", "padding", "post_processor")


class Tokenizer:
    """A tokenizer and the token that ends a document.

    Special tokens written out in a text are ordinary text: a document that mentions "<|endoftext|>" is not cut in two.
    No token is added around a text, and none is cut off.

    Args:
        definition: the content of a tokenizer.json.
        eos: the token that ends a document, a name in the vocabulary.
        name: where it came from, for messages and manifests.
        special: other special tokens to keep when saving, e.g. {"pad_token": "<|pad|>"}.

    Raises:
        ValueError: for a definition that cannot be read, or an `eos` that is not in the vocabulary.
    """

    def __init__(self, definition: str, eos: str, name: str, special: dict[str, str] | None = None) -> None:
        try:
            fields = json.loads(definition) | dict.fromkeys(_UNUSED)
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(fields))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{name} is not a tokenizer.json that this `tokenizers` can read: {error}") from error
        self._tokenizer.encode_special_tokens = True
        self.name, self.eos, self.special = name, eos, dict(special or {})
        eos_id = self._tokenizer.token_to_id(eos)
        if eos_id is None:
            raise ValueError(f"the end-of-document token {eos!r} is not in the vocabulary of {name}; name one that is")
        self.eos_id: int = eos_id
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def definition(self) -> str:
        """The content of tokenizer.json."""
        return self._tokenizer.to_str()

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex) of all that the ids depend on; fields at null or false do not count, so a newer library agrees."""
        content = json.dumps([_without_defaults(json.loads(self.definition)), self.eos_id], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def is_bytes(self) -> bool:
        """Whether this is the built-in tokenizer: id = byte value of the UTF-8 text."""
        return self.hash == byte_tokenizer().hash

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, int64 (tokens,). No end token is added.

        Raises:
            ValueError: for text that is not Unicode (a lone surrogate).
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of several texts, each int64 (tokens,), as `encode` gives them one by one."""
        try:
            if self.is_bytes:  # the same ids, some hundred times faster
                return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]
            rows = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            raise ValueError(f"not Unicode text, so it has no tokens: {error}; clean the text first") from error
        return [np.array(row.ids, np.int64) for row in rows]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids (any integers, one dimension); bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: for an id outside the vocabulary.
        """
        ids = [int(i) for i in ids]
        wrong = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} is outside the vocabulary of {self.vocab_size} tokens of {self.name}")
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json: `AutoTokenizer.from_pretrained(folder)` gives the same ids.

        There too special tokens written out in a text are text, unless a call says `split_special_tokens=False`. Padding goes to
        the left: a batch of unequal prompts can go on from its last column.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "tokenizer.json", self.definition)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eos,
            "pad_token": self.eos,
            "padding_side": "left",
            "split_special_tokens": True,
        }
        write_json(folder / "tokenizer_config.json", config | self.special | {"clean_up_tokenization_spaces": False})


def load_tokenizer(spec: str | Path | Tokenizer, *, eos: str | None = None) -> Tokenizer:
    """The tokenizer named by `spec`.

    Args:
        spec: "byte" (built in: id = byte value, 256 ends a document), the path of a tokenizer.json, a folder that holds
            one (or files that transformers turns into one), or the name of a model on the hub.
        eos: the token that ends a document; by default what tokenizer_config.json says, else a name that is known.

    Raises:
        FileNotFoundError: if there is neither such a file nor such a name on a hub that can be reached.
        ValueError: if no end-of-document token is known, or the file is not a tokenizer.
    """
    if isinstance(spec, Tokenizer):
        return spec
    if str(spec) == "byte":
        return byte_tokenizer()
    path = Path(spec).expanduser()
    if path.is_file():
        beside = path.parent if path.name == "tokenizer.json" else None
        return _from_definition(_text(path), str(spec), beside, eos)
    if path.is_dir():
        return _from_folder(path, str(spec), eos)
    return _from_folder(_hub_folder(str(spec)), str(spec), eos)


@cache
def byte_tokenizer() -> Tokenizer:
    """The built-in tokenizer: 256 byte values and <|endoftext|> = 256, a byte-level BPE without merges."""
    vocab = {symbol: value for value, symbol in enumerate(_byte_symbols())}
    built = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return Tokenizer(built.to_str(), END, "byte")


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte value in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(value) if value in printable else chr(next(others)) for value in range(256)]


def _without_defaults(value: Any) -> Any:
    """The same JSON without fields that are null or false."""
    if isinstance(value, dict):
        return {key: _without_defaults(item) for key, item in value.items() if item is not None and item is not False}
    if isinstance(value, list):
        return [_without_defaults(item) for item in value]
    return value


def _from_folder(folder: Path, name: str, eos: str | None) -> Tokenizer:
    file = folder / "tokenizer.json"
    if file.is_file():
        return _from_definition(_text(file), name, folder, eos)
    from transformers import AutoTokenizer  # only here: slow to import, and it can convert older formats

    try:
        converted = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        definition = converted.backend_tokenizer.to_str()
    except Exception as error:
        raise ValueError(f"{name} holds no tokenizer.json, nor files that transformers converts: {error}") from error
    return _from_definition(definition, name, folder, eos or converted.eos_token)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a tokenizer.json: it is not UTF-8 text ({error}); give byte or one") from error


def _from_definition(definition: str, name: str, folder: Path | None, eos: str | None) -> Tokenizer:
    special = _special_tokens(folder) if folder else {}
    declared = special.pop("eos_token", None)
    try:
        tokens = {token["content"] for token in json.loads(definition).get("added_tokens", [])}
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"{name} is not a tokenizer.json: {error}") from error
    end = eos or declared or next((known for known in _KNOWN_ENDS if known in tokens), None)
    if end is None:
        raise ValueError(f"{name} does not say which token ends a document; put eos_token in tokenizer_config.json beside it")
    if "pad_token" not in special and "<|pad|>" in tokens:
        special["pad_token"] = "<|pad|>"
    return Tokenizer(definition, end, name, special)


def _special_tokens(folder: Path) -> dict[str, str]:
    """Names of the special tokens that tokenizer_config.json declares: {"eos_token": ..., ...}."""
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    config = json.loads(file.read_text(encoding="utf-8"))
    found = {key: config.get(key) for key in ("eos_token", "bos_token", "pad_token", "unk_token")}
    names = {key: value["content"] if isinstance(value, dict) else value for key, value in found.items()}
    return {key: value for key, value in names.items() if isinstance(value, str)}


def _hub_folder(name: str) -> Path:
    """Local folder with the tokenizer files of a model on the hub."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.endswith(".json"):
        raise FileNotFoundError(f"no tokenizer at {name}; give byte, a tokenizer.json, a folder or a name on the hub")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, etag_timeout=10))
    except Exception as error:  # many kinds: no network, no such model, no access
        raise FileNotFoundError(
            f"no tokenizer file or folder {name} here, and the hub gave none ({type(error).__name__}: {error}); "
            "give the path of a tokenizer.json, or byte"
        ) from error
