"""A prepared folder of small documents, and recipes of a model small enough to train in a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proteus_lm.data.prepare import prepare
from proteus_lm.train.recipe import Recipe, make_recipe

WORDS = ["state", "memory", "opens", "block", "by", "block", "the", "a", "reads", "writes", "slowly", "and", "then", "decays"]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty documents of 100 to 500 bytes in the byte vocabulary (257), a quarter of them for validation."""
    folder = tmp_path_factory.mktemp("data")
    source, random = folder / "text", np.random.default_rng(0)
    source.mkdir()
    for number in range(40):
        words = random.choice(WORDS, size=int(random.integers(20, 100)))
        (source / f"{number:02d}.txt").write_text(" ".join(words) + ".")
    prepare(source, "byte", folder / "prepared", validation_fraction=0.25, workers=0, progress=False)
    return folder / "prepared"


@pytest.fixture
def recipe(data: Path) -> Callable[..., Recipe]:
    """recipe(steps=10, mixer="comba", lr=...): fields of any section by name, with small defaults."""

    def build(**changes: Any) -> Recipe:
        sections: dict[str, dict[str, Any]] = {
            "model": {"mixer": "attention", "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "head_dim": 8},
            "data": {"path": str(data), "context": 32},
            "train": {"steps": 6, "batch_size": 4, "device": "cpu", "log_every": 2, "validate_tokens": 64, "tensorboard": False},
        }
        names = {name: section for section, kind in _fields().items() for name in kind}
        for name, value in changes.items():
            sections[names.get(name, "model")][name] = value
        return make_recipe(sections)

    return build


def _fields() -> dict[str, list[str]]:
    import dataclasses

    from proteus_lm.train.recipe import DataRecipe, TrainRecipe

    return {"data": [f.name for f in dataclasses.fields(DataRecipe)], "train": [f.name for f in dataclasses.fields(TrainRecipe)]}
