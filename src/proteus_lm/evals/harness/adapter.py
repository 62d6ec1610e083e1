"""`LanguageModel` as lm-evaluation-harness asks a model. Needs lm-eval: import it only where that is certain.

It is built on the harness's public `TemplateLM`, which cuts texts into context and continuation; nothing inside its own Hugging
Face model is touched. The harness sees no limit of tokens and cuts nothing: `LanguageModel` refuses what is too long, or counts it.
"""

from __future__ import annotations

from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM

from proteus_lm.evals.long_context.tokens import encode_all

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from proteus_lm.evals.language_model import LanguageModel

_GENERATION = ("max_gen_toks", "max_new_tokens", "max_tokens")
_DEFAULT_NEW = 256


class HarnessModel(TemplateLM):
    """A `LanguageModel` for `lm_eval.evaluate`.

    Args:
        model: what answers.

    Attributes:
        cut: ids of the documents of which something was cut, since it was last emptied.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model, self.tokenizer = model, model.tokenizer
        self.cut: set[Any] = set()
        self._known: dict[str, list[int]] = {}

    @property
    def eot_token_id(self) -> int:
        """The end token."""
        return self.model.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context."""
        return self.model.prefix_id

    @property
    def tokenizer_name(self) -> str:
        """Of the tokenizer, for the harness's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, as the harness's Hugging Face model makes them: special tokens as the tokenizer likes, and not twice."""
        if add_special_tokens is None:
            if string in self._known:
                return list(self._known[string])
            if string.startswith(self._prefix):
                add_special_tokens = False
        options: dict[str, Any] = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **options))

    @cached_property
    def _prefix(self) -> str:
        return str(self.tokenizer.decode([self.prefix_token_id]))

    def _encode_together(self, requests: list[Instance]) -> dict[str, list[int]]:
        """Ids of the texts that the harness will ask for one by one: each context without its last spaces, and each whole."""
        pairs: list[tuple[str, ...]] = [request.args for request in requests]
        texts = {text for pair in pairs if pair[0] for text in (pair[0].rstrip(), pair[0] + pair[1])}
        alike = sorted(text for text in texts if text and not text.startswith(self._prefix))
        return dict(zip(alike, encode_all(self.tokenizer, alike)))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """As the harness: (log p of the continuation in nats, whether greedy decoding gives it) of each (context, continuation)."""
        self._asked = [request.doc_id for request in requests]
        self._known = self._encode_together(requests)
        try:
            return super().loglikelihood(requests, disable_tqdm=True)
        finally:
            self._known = {}

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        limit = self.model.max_length
        for document, (_, context, continuation) in zip(self._asked, requests):
            if limit is not None and len(context) + len(continuation) > limit + 1:
                self.cut.add(document)
        return self.model.loglikelihoods([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """As the harness: log p of each whole document in nats."""
        documents = [self.tok_encode(request.args[0]) for request in requests]
        return self.model.rolling(documents, prefix=self.prefix_token_id)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """As the harness: the greedy text after each context, up to the first of its stop strings.

        Raises:
            ValueError: for a request to draw, or to search with beams.
        """
        texts = [""] * len(requests)
        asked: list[tuple[Any, ...]] = [request.args for request in requests]
        order = sorted(range(len(requests)), key=lambda i: repr(asked[i][1]))
        for _, group in groupby(order, key=lambda i: repr(asked[i][1])):
            members = list(group)
            count, stop = _greedy(dict(asked[members[0]][1]))
            prompts = [self.tok_encode(asked[i][0]) for i in members]
            limit = self.model.max_length
            self.cut |= {requests[i].doc_id for i, p in zip(members, prompts) if limit is not None and len(p) + count > limit}
            for i, text in zip(members, self.model.generate(prompts, max_new_tokens=count, stop=stop)):
                texts[i] = text
        return texts


def _greedy(options: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
    """New tokens at most, and stop strings, of the harness's options for a text."""
    until = options.pop("until", None) or []
    counts = [options.pop(name) for name in _GENERATION if options.get(name) is not None]
    if options.get("do_sample") or options.get("temperature") or (options.get("num_beams") or 1) > 1:
        raise ValueError(f"generation with {options}; only greedy decoding is done here (do_sample false, temperature 0)")
    stop = [until] if isinstance(until, str) else list(until)
    return int(counts[0]) if counts else _DEFAULT_NEW, tuple(text for text in stop if text)
