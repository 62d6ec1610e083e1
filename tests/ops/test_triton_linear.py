"""The Triton kernels of the linear memories in Triton's interpreter, against the token-by-token oracle in fp64.

The interpreter is chosen when Triton is first imported, so the cases run in a process of their own (`triton_linear_cases.py`): one
process, one line of JSON a case. bf16 is not to be had there; the GPU runs of benchmarks/ops.py check it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from proteus_lm.ops import triton as kernels
from proteus_lm.ops.triton.plan import build
from tests.ops.triton_linear_cases import CASES, STEPS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")
# Root mean square error over a tensor, relative. fp32 runs exact products here; what is left is the rounding of the cumulative log
# decay, which at -50 a token reaches 1600 in a chunk (unit in the last place 1.2e-4). fp16 has 10 bits.
LIMITS = {"float32": 1e-5, "float32, strong decay": 1e-3, "float16": 1e-2}


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, float]]:
    script = Path(__file__).with_name("triton_linear_cases.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return {row["name"]: row["errors"] for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", CASES)
def test_outputs_states_and_all_gradients_agree_with_the_oracle(name, measured):
    case = CASES[name]
    strong = case.get("decay", 1.0) > 10
    limit = LIMITS[case.get("dtype", "float32") + (", strong decay" if strong and "dtype" not in case else "")]
    wrong = {tensor: error for tensor, error in measured[name].items() if not error < limit}
    assert not wrong


@pytest.mark.parametrize("name", STEPS)
def test_a_decoding_step_agrees_and_leaves_locked_coordinates_alone(name, measured):
    assert {k: e for k, e in measured[name].items() if not e < 1e-5} == {}


def fields(row):
    """First token, tokens, open, open next, as `read_row` of the kernels takes them apart."""
    return [row & 0xFFFFFFFF, row >> 32 & 0xFF, row >> 40 & 0xFFF, row >> 52 & 0xFFF]


def test_a_row_of_the_chunk_table_holds_wide_memories():
    active = torch.tensor([1500, 1500, 4095, 4095])
    rows = build(torch.tensor([0, 4]), active, 4, 4095, 2, rows=2).chunks.tolist()
    assert [fields(x) for x in rows] == [[0, 2, 1500, 4095], [2, 2, 4095, 0]]


def test_chunks_end_at_unlocks_and_documents_and_know_what_opens_behind_them():
    active = torch.tensor([4] * 3 + [8] * 4 + [4] * 2)
    plan = build(torch.tensor([0, 7, 9]), active, 9, 16, 2, rows=9)
    first_tokens_open_next = [fields(x) for x in plan.chunks.tolist()]
    assert first_tokens_open_next[:5] == [[0, 2, 4, 4], [2, 1, 4, 8], [3, 2, 8, 8], [5, 2, 8, 0], [7, 2, 4, 0]]
    assert not any(tokens or soon for _, tokens, _, soon in first_tokens_open_next[5:])


def test_refusals_name_their_reason():
    q = torch.zeros(1, 4, 1, 8)
    assert "no Triton kernel" in kernels.refuse("titans_memory", (q,))
    if os.environ.get("TRITON_INTERPRET") != "1":
        assert "cpu" in kernels.refuse("comba", (q, q, q, q, q[..., 0], q[..., 0]))
    meta = torch.zeros(1, 4, 1, 300, device="meta")
    assert kernels.refuse("retention", (meta, meta, meta, meta[..., 0])) is not None
