"""Models that need no weights: one that says what it is told to say, on prompts read back from their tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from proteus_lm.data.tokenizer import byte_tokenizer
from proteus_lm.evals.long_context import tokenizer_hash

ESSAY = " ".join(
    f"The {place} lay quiet in the {time}. Nobody of the {people} knew why, and few had asked. "
    f"Was it the {thing}? It was not; so the old {people} said."
    for place in ("harbour", "market", "valley", "orchard", "station", "meadow")
    for time in ("morning", "winter", "long dry summer", "evening")
    for people in ("farmers", "sailors", "clerks")
    for thing in ("rain", "railway", "tax on salt", "war")
)


def byte_level() -> PreTrainedTokenizerFast:
    """One token a byte, no special token around a text."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_tokenizer().definition),
        eos_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([ESSAY], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str()


def pieces() -> PreTrainedTokenizerFast:
    """Byte-pair pieces of English, and a beginning token before each text."""
    tokenizer = Tokenizer.from_str(_trained())
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )


class Says:
    """Stands in for `LanguageModel`: `answer` gives the text behind a prompt's text."""

    def __init__(self, answer: Callable[[str], str], tokenizer=None, *, max_length: int | None = None) -> None:
        self.answer, self.tokenizer, self.max_length = answer, tokenizer or byte_level(), max_length
        self.name, self.truncated, self.allow_truncation = "says", 0, False
        self.prompts: list[list[int]] = []
        self.asked: list[tuple[int, tuple[str, ...]]] = []

    @property
    def tokenizer_hash(self) -> str:
        return tokenizer_hash(self.tokenizer)

    def generate(self, prompts, *, max_new_tokens, stop=()):
        texts = []
        for prompt in prompts:
            if self.max_length is not None and len(prompt) > self.max_length - max_new_tokens:
                assert self.allow_truncation, "a prompt came that the model cannot read"
                self.truncated += 1
                prompt = prompt[-(self.max_length - max_new_tokens) :]
            self.prompts.append(list(prompt))
            self.asked.append((max_new_tokens, tuple(stop)))
            texts.append(self.answer(self.tokenizer.decode(prompt, skip_special_tokens=True)))
        return texts

    @property
    def texts(self) -> list[str]:
        """The prompts it was asked, as text."""
        return [self.tokenizer.decode(prompt, skip_special_tokens=True) for prompt in self.prompts]


def essays(folder: Path) -> Path:
    """A data folder with a haystack in it."""
    (folder / "essays.txt").write_text(ESSAY)
    return folder
