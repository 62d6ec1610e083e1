"""The right values in ../shared/vectors, as arguments of an operation."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proteus_lm import ActivationSchedule

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "vectors"
OPERATIONS = {
    "retention": ("retention", ("g",)),
    "delta": ("delta_rule", ("beta",)),
    "gated_delta": ("gated_delta_rule", ("g", "beta")),
    "comba": ("comba", ("p", "g", "beta")),
    "swla": ("swla", ("g", "gamma")),
    "titans": ("titans_memory", ("theta", "alpha", "eta")),
}


@dataclass
class Vector:
    """One file: the operation's name, its tensors in order, its keywords, and every array in the file."""

    name: str
    operation: str
    inputs: dict[str, Tensor]
    keywords: dict[str, Any]
    arrays: dict[str, Tensor] = field(repr=False)
    depth: int = 0

    @property
    def weights(self) -> list[str]:
        return [f"W{i + 1}" for i in range(self.depth)]


def index(rule: str | None = None) -> list[dict]:
    """Rows of index.json, of one rule or of all operations; empty where the folder is not there."""
    if not FOLDER.is_dir():
        return []
    rows = json.loads((FOLDER / "index.json").read_text())
    return [row for row in rows if row["rule"] in OPERATIONS and rule in (None, row["rule"])]


def load(row: dict) -> Vector:
    """Read one file of the index; gradients' inputs require grad."""
    with np.load(FOLDER / row["file"]) as file:
        arrays = {name: torch.from_numpy(np.atleast_1d(file[name])) for name in file.files}
    operation, extra = OPERATIONS[row["rule"]]
    inputs = {name: arrays[name] for name in ("q", "k", "v", *extra)}
    depth = len([n for n in arrays if n.startswith("W")])
    keywords: dict[str, Any] = {"output_final_state": True}
    cu_seqlens = arrays.get("cu_seqlens")
    if row["rule"] == "titans":
        dim = row["shape"][4] if depth > 1 else row["shape"][3]
        keywords |= {"chunk": row["chunk"], "read": row["read"]}
        if "initial_W1" in arrays:
            keywords["initial_state"] = tuple(tuple(arrays[f"initial_{x}{i + 1}"] for i in range(depth)) for x in ("W", "S"))
    else:
        axis = "value" if row["axis"] == "value" else "key"
        dim = row["shape"][4] if axis == "value" else row["shape"][3]
        keywords |= {"axis": axis}
        if "scale" in arrays:
            keywords["scale"] = float(arrays["scale"])
        if "initial_state" in arrays:
            keywords["initial_state"] = arrays["initial_state"]
    if row["blocks"] > 1:
        schedule = ActivationSchedule(row["blocks"], row["context"])
        keywords["activation"] = schedule.activation(dim, row["shape"][1], offset=arrays.get("offset"), cu_seqlens=cu_seqlens)
    elif "offset" in arrays:
        raise AssertionError(f"{row['file']}: an offset without a schedule")
    keywords["cu_seqlens"] = cu_seqlens
    return Vector(row["file"], operation, inputs, keywords, arrays, depth)


def error(value: Tensor, right: Tensor) -> float:
    """Largest difference, relative to the largest right value (or 1)."""
    assert value.shape == right.shape
    return ((value - right).abs().max() / right.abs().max().clamp(min=1)).item()
