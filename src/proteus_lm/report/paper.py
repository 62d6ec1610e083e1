"""The paper's own numbers (Proteus, arXiv 2608.16844v1): Tables 1, 2 and 3, and whatever a user's file adds.

The tables here were copied from a public transcription of the paper's PDF. Its rows were put back in order where the transcription
had run two together, and each row checked: the eight accuracies of Table 1 and the six tasks of Table 3 give the printed average,
and every number that the paper's text repeats is the same. Figures 2, 3 and 4 are plots whose values the paper does not print:
there is no copy here, and `load_paper` takes values that a user has read off, marked as such.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARXIV = "arXiv 2608.16844v1"
NOT_AT_HAND = "paper's value not at hand"
NOT_IN_PAPER = "not in the paper"
ANY_METRIC = ""
"""The metric of a key whose task has one metric only, whatever it is called."""

Key = tuple[str, str, str]
"""(suite, task, metric) as in `evals.suite.Score`; lengths of Table 2 stand in the place of the metric."""


@dataclass(frozen=True)
class PaperValue:
    """A number the paper gives.

    Args:
        model: its row, such as "Titans" or "Titans + Proteus".
        size: "760M", "1.3B", or "" where the paper does not say.
        value: as printed (percent, perplexity).
        source: where it stands.
        read_off: read off a plot, not printed.
    """

    model: str
    size: str
    value: float
    source: str
    read_off: bool = False


Paper = Mapping[Key, Sequence[PaperValue]]

TABLE1 = (
    ("wikitext", "word_perplexity"),
    ("lambada_openai", "perplexity"),
    ("lambada_openai", "acc"),
    ("piqa", "acc"),
    ("hellaswag", "acc_norm"),
    ("winogrande", "acc"),
    ("arc_easy", "acc"),
    ("arc_challenge", "acc_norm"),
    ("social_iqa", "acc"),
    ("boolq", "acc"),
)
"""Columns of Table 1, by lm-evaluation-harness's names; the average is over the eight accuracies."""
TABLE2 = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multiquery", "niah_multivalue")
TABLE2_LENGTHS = (4096, 8192, 16384)
TABLE3 = ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique")
"""Columns of Table 3, by LongBench's names."""
AVERAGE = "average"

_TABLE1 = {
    "760M": """
        Transformer++            22.08 22.41 38.2 68.9 44.1 56.8 67.0 34.9 40.2 62.4 51.56
        Hope-Attention           20.67 21.36 39.5 70.4 50.1 56.3 66.9 37.5 40.7 63.8 53.15
        Hope-Attention + Proteus 19.87 19.72 40.5 70.2 51.9 58.2 67.3 38.5 41.4 63.9 53.99
        RetNet                   23.54 23.87 35.7 66.4 42.8 53.6 64.8 33.1 38.7 57.4 49.06
        SWLA                     22.76 22.85 36.7 67.5 44.2 54.7 64.6 34.3 39.9 59.1 50.12
        SWLA + Proteus           21.82 20.88 37.5 67.1 44.9 54.7 66.0 35.8 41.0 60.2 50.90
        DeltaNet                 22.89 23.13 37.2 68.0 45.2 52.9 65.4 33.4 40.2 59.8 50.26
        Comba                    21.94 21.77 38.4 67.1 47.1 53.0 65.9 35.5 40.8 63.7 51.43
        Comba + Proteus          21.32 21.20 39.1 67.9 47.6 54.7 66.2 35.4 41.6 64.7 52.15
        Titans                   20.92 21.28 39.3 69.2 49.9 53.1 67.3 36.9 41.7 63.8 52.65
        Titans + Proteus         20.44 20.93 40.0 69.5 50.7 56.1 67.2 36.8 42.6 64.0 53.36
    """,
    "1.3B": """
        Transformer++            17.04 17.42 45.3 73.1 51.8 59.3 71.0 38.2 43.5 64.3 55.81
        Hope-Attention           15.66 13.39 48.2 72.9 55.0 59.8 72.2 38.7 43.3 65.4 56.93
        Hope-Attention + Proteus 15.70 13.01 48.5 73.1 55.4 60.8 73.1 38.5 44.2 64.8 57.30
        RetNet                   18.84 17.29 40.8 70.6 48.9 56.0 67.9 35.3 41.6 62.7 52.98
        SWLA                     18.11 16.95 40.7 71.4 49.2 57.3 68.8 37.0 42.4 62.6 53.67
        SWLA + Proteus           18.07 17.18 40.6 71.9 50.5 57.8 69.4 37.1 43.2 63.1 54.20
        DeltaNet                 17.39 17.02 40.0 71.4 50.1 53.9 68.3 36.6 43.3 60.7 53.04
        Comba                    16.98 14.17 43.8 73.2 53.5 60.1 70.9 39.2 44.2 58.5 55.42
        Comba + Proteus          16.95 14.01 44.6 73.1 54.2 60.4 71.4 39.5 44.6 60.2 56.00
        Titans                   15.36 13.18 50.9 74.0 54.6 57.3 72.2 40.9 42.6 63.1 56.95
        Titans + Proteus         14.94 13.03 51.7 75.9 54.6 60.1 72.3 41.7 43.9 63.8 58.00
    """,
}
_TABLE2 = """
    Transformer++             97.8 86.2 83.8 100  99.2 96.4 82.2 72.0 48.4 80.0 79.4 60.8 57.4 46.2 28.8 36.6 33.8 20.2
    Hope-Attention            100  100  100  100  99.4 96.8 83.4 72.8 50.0 81.4 85.2 62.2 62.0 47.6 30.6 37.2 36.2 23.0
    Hope-Attention + Proteus  100  100  100  100  99.4 97.2 83.2 73.2 54.4 80.8 85.2 64.8 62.2 48.4 34.2 36.6 36.0 25.8
    Comba                     100  100  99.4 92.6 47.2 13.4 62.4 13.8 7.4  22.8 20.4 10.4 22.2 16.0 6.2  15.8 14.2 6.6
    Comba + Proteus           100  100  99.2 91.8 49.4 21.2 60.8 18.2 10.8 23.4 20.2 14.2 23.8 16.6 8.4  14.8 14.0 8.2
    Titans                    100  100  100  99.6 84.6 69.4 74.2 42.8 21.4 27.0 22.8 11.8 23.2 18.4 10.2 24.8 15.4 8.8
    Titans + Proteus          100  100  100  99.2 85.2 74.2 74.2 44.0 29.8 28.4 22.6 16.8 23.2 18.6 12.0 24.6 14.8 10.2
"""
_TABLE3 = """
    Hope-Attention            12.1 9.4  19.2 20.6 26.7 6.3 15.72
    Hope-Attention + Proteus  12.6 10.2 20.9 21.5 27.3 7.4 16.65
    Comba                     7.6  10.4 15.9 14.6 23.1 6.7 13.05
    Comba + Proteus           7.8  10.8 16.2 14.5 23.2 6.9 13.23
    Titans                    8.0  10.3 17.4 15.6 24.8 6.7 13.8
    Titans + Proteus          8.4  10.4 17.9 16.4 25.1 6.7 14.15
"""
IN_WORDS = {
    "fig2": "Proteus is more robust at longer contexts with Hope-Attention, Comba and Titans (section 5.3).",
    "fig3": "Validation perplexity improves sharply from E = 1 to 8, is lowest at 16, and is worse again at 32 (appendix A).",
    "fig4": "Proteus is lower at every position; the gap is largest around 8K and stays positive out to 32K (appendix A).",
}
"""What the paper says of its plots in words; it prints no values."""
_FIELDS = {"suite": str, "task": str, "metric": str, "model": str, "size": str, "value": float, "source": str, "read_off": bool}
_NEEDED = ("suite", "task", "model", "value")
_SUITES = ("table1", "table2", "table3", "babilong", "fig2", "fig3", "fig4")


def _rows(text: str) -> Iterable[tuple[str, list[float]]]:
    """Model and numbers of each line."""
    for line in text.strip().splitlines():
        words = line.split()
        name = [word for word in words if not word[0].isdigit()]
        yield " ".join(name), [float(word) for word in words[len(name) :]]


def _add(paper: dict[Key, list[PaperValue]], text: str, size: str, source: str, keys: Sequence[Key]) -> None:
    for model, values in _rows(text):
        for key, value in zip(keys, values, strict=True):
            paper.setdefault(key, []).append(PaperValue(model, size, value, f"{ARXIV}, {source}"))


def _printed() -> dict[Key, list[PaperValue]]:
    """What the paper's tables print."""
    paper: dict[Key, list[PaperValue]] = {}
    columns = [*(("table1", *column) for column in TABLE1), ("table1", AVERAGE, "acc")]
    for size, text in _TABLE1.items():
        _add(paper, text, size, f"Table 1, {size}", columns)
    _add(paper, _TABLE2, "", "Table 2", [("table2", task, str(length)) for task in TABLE2 for length in TABLE2_LENGTHS])
    _add(paper, _TABLE3, "", "Table 3", [("table3", task, ANY_METRIC) for task in (*TABLE3, AVERAGE)])
    return paper


PAPER: Paper = _printed()
"""Every value of Tables 1, 2 and 3 by (suite, task, metric)."""


def load_paper(path: str | Path) -> Paper:
    """`PAPER` with the values of a user's YAML or JSON file added; one of the same key, model and size is replaced.

    The file holds `source` (where its values are from) and `values`, a list of
    {suite, task, metric (left out: the task's only one), model, size (left out: not said), value, read_off (left out: false),
    source (left out: the file's)}. `suite` is table1, table2, table3, babilong, fig2, fig3 or fig4; `task` and `metric` are those
    of our results (`proteus eval --json` shows them); `model` is written as in the paper's tables ("Titans + Proteus").

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: naming the entry and the field, for anything else than this layout.
    """
    import yaml

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; give the YAML or JSON file with the paper's values")
    text = path.read_text(encoding="utf-8")
    try:
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not readable: {error}") from error
    if not isinstance(content, dict) or set(content) != {"source", "values"} or not isinstance(content["values"], list):
        raise ValueError(f"{path} must hold `source` (text) and `values` (a list), and nothing else; see docs/evaluation.md")
    if not isinstance(content["source"], str) or not content["source"].strip():
        raise ValueError(f"{path}: source is {content['source']!r}; say where the values are from")
    paper = {key: list(values) for key, values in PAPER.items()}
    for number, entry in enumerate(content["values"], 1):
        key, value = _entry(entry, f"{path}, value {number}", content["source"])
        kept = [v for v in paper.get(key, []) if (v.model, v.size) != (value.model, value.size)]
        paper[key] = [*kept, value]
    return paper


def _entry(entry: Any, where: str, source: str) -> tuple[Key, PaperValue]:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is {entry!r}; it must be a mapping with {', '.join(_NEEDED)}")
    unknown = [name for name in entry if name not in _FIELDS]
    missing = [name for name in _NEEDED if name not in entry]
    if unknown or missing:
        what = f"has no {', '.join(missing)}" if missing else f"has {', '.join(map(str, unknown))}, which is not known"
        raise ValueError(f"{where} {what}; fields: {', '.join(_FIELDS)}")
    for name, kind in _FIELDS.items():
        value = entry.get(name)
        right = isinstance(value, int | float) and not isinstance(value, bool) if kind is float else isinstance(value, kind)
        if name in entry and not right:
            raise ValueError(f"{where}: {name} is {value!r}; it must be {'a number' if kind is float else kind.__name__}")
    if entry["suite"] not in _SUITES:
        raise ValueError(f"{where}: suite is {entry['suite']!r}; it must be one of {', '.join(_SUITES)}")
    key = (entry["suite"], entry["task"], entry.get("metric", ANY_METRIC))
    value = PaperValue(
        entry["model"], entry.get("size", ""), float(entry["value"]), entry.get("source", source), entry.get("read_off", False)
    )
    return key, value


def find_value(paper: Paper, suite: str, task: str, metric: str, model: str | None, size: str) -> PaperValue | str:
    """The paper's value for one of our cells, or why there is none (`NOT_AT_HAND`, `NOT_IN_PAPER`, a dash for other models).

    Args:
        model: our row's name in the paper's tables (`paper_model`); None for a model the paper does not have.
        size: whose values to show where the paper has several sizes.
    """
    values = paper.get((suite, task, metric)) or paper.get((suite, task, ANY_METRIC))
    if not values:
        return NOT_AT_HAND if suite in ("fig2", "fig3", "fig4") else NOT_IN_PAPER
    if model is None:
        return "–"
    return next((value for value in values if value.model == model and value.size in ("", size)), NOT_IN_PAPER)


_NAMES = {
    "attention": "Transformer++",
    "retnet": "RetNet",
    "swla": "SWLA",
    "deltanet": "DeltaNet",
    "comba": "Comba",
    "titans": "Titans",
}


def paper_model(config: Mapping[str, Any]) -> str | None:
    """The row of the paper's tables that a configuration of ours stands for; None where it has none.

    More than one block of memory (or of a chain's hidden units) makes it a row "+ Proteus". A hybrid form of Titans has no row.
    """
    name = _NAMES.get(str(config.get("mixer")))
    if name is None or (name == "Titans" and config.get("titans_variant") not in ("lmm", None)):
        return None
    blocks = config.get("memory_blocks") or 1
    if name == "Transformer++" and config.get("channel") == "chain":
        name, blocks = "Hope-Attention", config.get("update_blocks") or 1
    return f"{name} + Proteus" if blocks > 1 else name
