"""What of the benchmarks can go wrong without a GPU: `benchmarks/ops_right.py` has a limit for whatever it checks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture
def right(monkeypatch):
    """The module `benchmarks/ops_right.py`."""
    pytest.importorskip("triton")
    path = Path(__file__).parents[1] / "benchmarks" / "ops_right.py"
    spec = importlib.util.spec_from_file_location("ops_right", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ops_right", module)
    spec.loader.exec_module(module)
    return module


def test_every_case_of_the_linear_kernels_is_judged_by_a_limit_of_its_type(right):
    cases = right.our_cases(right.RULES) + right.fla_cases(right.RULES)
    assert {case.dtype for case in cases} <= set(right.LIMITS)
    assert {case.dtype for case in right.our_cases(["comba"])} == {torch.bfloat16, torch.float16, torch.float32}
    assert right._judged({"rule": "comba"}, {"out": 0.5}, right.LIMITS[torch.float16], "a case")["right"] is False


def test_the_cases_have_walks_back_with_and_without_a_gradient_of_the_final_state(right):
    for rule in right.RULES:
        gated = [case for case in right.our_cases([rule]) if case.blocks > 1]
        assert {(case.axis, case.final) for case in gated} == {("key", True), ("key", False), ("value", True), ("value", False)}
