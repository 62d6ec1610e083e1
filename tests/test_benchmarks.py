"""What of the benchmarks can go wrong without a GPU: `ops_right.py` limits all it checks, `knockout.py` finds its parts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture
def load(monkeypatch):
    """A function that imports a module of benchmarks/."""
    pytest.importorskip("triton")
    folder = Path(__file__).parents[1] / "benchmarks"

    def loaded(name):
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return loaded


@pytest.fixture
def right(load):
    """The module `benchmarks/ops_right.py`."""
    return load("ops_right")


def test_every_case_of_the_linear_kernels_is_judged_by_a_limit_of_its_type(right):
    cases = right.our_cases(right.RULES) + right.fla_cases(right.RULES)
    assert {case.dtype for case in cases} <= set(right.LIMITS)
    assert {case.dtype for case in right.our_cases(["comba"])} == {torch.bfloat16, torch.float16, torch.float32}
    assert right._judged({"rule": "comba"}, {"out": 0.5}, right.LIMITS[torch.float16], "a case")["right"] is False


def test_the_cases_have_walks_back_with_and_without_a_gradient_of_the_final_state(right):
    for rule in right.RULES:
        gated = [case for case in right.our_cases([rule]) if case.blocks > 1]
        assert {(case.axis, case.final) for case in gated} == {("key", True), ("key", False), ("value", True), ("value", False)}


def test_every_part_that_can_be_left_out_of_the_hopper_kernels_is_found_in_them(right, load):
    load("timing")
    knockout = load("knockout")
    whole = knockout.sources("none", "package")
    for part in knockout.PARTS:
        texts = knockout.sources(part, "package")
        assert [name for name in texts if texts[name] != whole[name]] == ([] if part == "none" else ["_tiles"])
        for name, text in texts.items():
            compile(text, name, "exec")
        assert "from package._tiles import" in texts["_walks"]


def test_a_part_that_is_no_longer_there_is_said(right, load):
    load("timing")
    knockout = load("knockout")
    knockout.PARTS["loads"] = (("copy(nothing)", ""),)
    with pytest.raises(ValueError, match=r"'copy\(nothing\)' stands 0 times"):
        knockout.sources("loads", "package")
