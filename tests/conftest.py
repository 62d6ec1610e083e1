"""Shared fixtures: where the common data lies, one thread, NaN-poisoned fresh memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: kernels run on the CPU, small
torch.set_num_threads(1)
# Deterministic mode fills torch.empty with NaN, so that a value nobody wrote is seen.
torch.use_deterministic_algorithms(True)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of right values and real data beside the project."""
    path = Path(__file__).resolve().parents[2] / "shared"
    if not path.is_dir():
        pytest.skip(f"needs {path} (test vectors and real data), which is not here")
    return path
