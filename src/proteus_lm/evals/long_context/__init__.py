"""What the suites of long contexts share: rows of data, haystacks, prompts of an exact length, questions asked and scored."""

from proteus_lm.evals.long_context.asking import Answered, Question, ask, readable, score_of
from proteus_lm.evals.long_context.fit import NoRoom, fit
from proteus_lm.evals.long_context.haystack import Haystack, load_haystack
from proteus_lm.evals.long_context.rows import Rows, find_file, hub_rows, read_rows
from proteus_lm.evals.long_context.store import Store
from proteus_lm.evals.long_context.tokens import count_tokens, encode_all, tokenizer_hash

__all__ = [
    "Answered",
    "Haystack",
    "NoRoom",
    "Question",
    "Rows",
    "Store",
    "ask",
    "count_tokens",
    "encode_all",
    "find_file",
    "fit",
    "hub_rows",
    "load_haystack",
    "read_rows",
    "readable",
    "score_of",
    "tokenizer_hash",
]
