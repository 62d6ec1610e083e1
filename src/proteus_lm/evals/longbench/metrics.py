"""LongBench's metrics for one prediction and one reference, 0 to 1, as its authors compute them (LongBench/metrics.py)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def qa_f1_score(prediction: str, reference: str) -> float:
    """F1 over words, without case, punctuation and articles (SQuAD's)."""
    said, right = _normal(prediction), _normal(reference)
    same = sum((Counter(said) & Counter(right)).values())
    return 2 * same / (len(said) + len(right)) if same else 0.0


def rouge_score(prediction: str, reference: str) -> float:
    """ROUGE-L of whole summaries as PyPI's `rouge` 1.0.1 gives it: F over the different words of the union of common subsequences.

    Sentences end at full stops. A prediction without a word scores 0.
    """
    said, right = _sentences(prediction), _sentences(reference)
    if not said or not right:
        return 0.0
    common = {word for ours in right for theirs in said for word in _common_subsequence(ours, theirs)}
    precision = len(common) / len({word for sentence in said for word in sentence})
    recall = len(common) / len({word for sentence in right for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def classification_score(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 over the number of class names that stand in the prediction, where the right one is among them.

    A name that is only a part of the right one does not count; but, as upstream, the name behind one so dropped is not looked at.
    """
    said = [name for name in classes if name in prediction]
    for name in said:
        if name in reference and name != reference:
            said.remove(name)  # upstream changes the list that it walks, and scores must be the same
    return 1 / len(said) if reference in said else 0.0


def retrieval_score(prediction: str, reference: str) -> float:
    """Share of the numbers in the prediction that are the reference's paragraph ("Paragraph 7")."""
    found = re.search(r"Paragraph (\d+)", reference)
    if found is None:
        raise ValueError(f"the reference {reference!r} names no paragraph; it must be like 'Paragraph 7'")
    return count_score(prediction, found.group(1))


def count_score(prediction: str, reference: str) -> float:
    """Share of the numbers in the prediction that are the reference."""
    numbers = re.findall(r"\d+", prediction)
    return sum(number == reference for number in numbers) / len(numbers) if numbers else 0.0


def _normal(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def _sentences(text: str) -> list[list[str]]:
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part] if text.strip() else []


def _common_subsequence(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """A longest common subsequence; among several, the one that goes back in `b` first, as `rouge` does."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a, 1):
        row, above = table[i], table[i - 1]
        for j, y in enumerate(b, 1):
            row[j] = above[j - 1] + 1 if x == y else max(above[j], row[j - 1])
    i, j, found = len(a), len(b), list[str]()
    while i and j:
        if a[i - 1] == b[j - 1]:
            found.append(a[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found
