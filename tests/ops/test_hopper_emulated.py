"""The Hopper kernels of the linear memories on the CPU, by `gluon_emulator.py`, against the token-by-token oracle in fp64.

Triton's `prepare` runs in Triton's interpreter, in fp16. What the emulator must find is put into the kernels, one fault a test.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ops.gluon_emulator import EmulationError, Modules
from tests.ops.triton_linear_cases import NAMES, measure

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="Triton's interpreter is off where there is a GPU, which runs the kernels"
    ),
]
LIMIT = 5e-3  # root mean square over a tensor: fp16 gives 2e-4 to 8e-4, 4e-3 where a tensor is one number
CASES: dict[str, dict[str, Any]] = {
    "one token": {"size": (1, 1, 1, 64, 64), "initial": True},
    "two rows of 65 tokens": {"size": (2, 65, 2, 128, 128)},
    "unlocks in a chunk, keys": {"size": (1, 200, 2, 128, 128), "blocks": 4, "axis": "key"},
    "unlocks in a chunk, values": {"size": (1, 200, 2, 128, 128), "blocks": 4, "axis": "value"},
    "one tile of keys": {"size": (2, 130, 1, 64, 128), "blocks": 8, "axis": "key", "initial": True},
    "one tile of values": {"size": (2, 130, 1, 128, 64), "blocks": 8, "axis": "value", "initial": True},
    "tiles that never open, keys": {"size": (1, 100, 1, 128, 64), "blocks": 4, "context": 1000, "axis": "key", "initial": True},
    "tiles that never open, values": {"size": (1, 100, 1, 64, 128), "blocks": 4, "context": 1000, "axis": "value", "initial": True},
    "offsets, keys": {"size": (2, 100, 1, 128, 64), "blocks": 4, "context": 120, "axis": "key", "initial": True, "offset": [0, 70]},
    "offsets, values": {"size": (2, 100, 1, 64, 128), "blocks": 4, "context": 120, "axis": "value", "offset": [0, 70]},
    "documents, keys": {"size": (1, 150, 1, 128, 128), "blocks": 4, "context": 100, "axis": "key", "documents": [0, 5, 70, 150]},
    "documents, values": {
        "size": (1, 150, 1, 64, 128),
        "blocks": 4,
        "context": 100,
        "axis": "value",
        "documents": [0, 5, 70, 150],
        "initial": True,
    },
    "strong decay": {"size": (1, 130, 1, 64, 64), "decay": 50.0},
    "three tiles of values": {"size": (1, 130, 1, 64, 192), "blocks": 6, "axis": "value", "initial": True},
    "eight tiles of values": {"size": (1, 70, 1, 128, 512)},
}


@pytest.fixture
def emulated(monkeypatch):
    """A function that puts emulated kernels in the place of compiled ones and gives the list of those that ran."""
    from proteus_lm.ops.triton import hopper

    def put(seed: int = 0, edits: tuple[tuple[str, str, str], ...] = (), processors: int = 3) -> list[str]:
        modules = Modules(Path(hopper.__file__).parent, seed, edits)
        kernels = [modules.load("_walks").scan, modules.load("_walks").reverse, modules.load("_gradients").gradients]
        ran: list[str] = []

        monkeypatch.setattr(hopper, "_kernels", lambda: [Noted(kernel, ran) for kernel in kernels])
        monkeypatch.setattr(hopper, "_refuse", lambda device: None)
        properties = SimpleNamespace(multi_processor_count=processors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return ran

    return put


class Noted:
    """A kernel whose launches are written down."""

    def __init__(self, kernel: Any, ran: list[str]) -> None:
        self.kernel, self.ran = kernel, ran

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.ran.append(self.kernel.__name__)
        return self.kernel[grid]


def errors(rule: str, case: dict[str, Any]) -> dict[str, float]:
    """What lies over the limit."""
    torch.manual_seed(0)
    found = measure({"rule": rule, "context": case["size"][1], "dtype": "float16", **case})
    return {name: error for name, error in found.items() if not error < LIMIT}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rule", NAMES)
def test_outputs_states_and_all_gradients_agree_with_the_oracle(rule, name, emulated):
    ran = emulated()
    assert errors(rule, CASES[name]) == {}
    walks = [] if rule == "swla" else ["scan", "scan", "reverse"]  # with what gradients need and without; swla's are Triton's
    assert ran == walks + ["gradients"] * (CASES[name]["size"][4] <= 128)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("rule", NAMES)
def test_no_order_of_partitions_and_copies_changes_anything(rule, seed, emulated):
    """Other orders, and other numbers of multiprocessors: a program of `gradients` takes one chunk, several or all."""
    for name, case in CASES.items():
        emulated(seed, processors=(1, 2, 5, 64)[seed % 4])
        assert errors(rule, case) == {}, name


STATES = "            mbarrier.wait(full.index(2), i & 1)\n            fence_async_shared()\n"
RESULTS = "            mbarrier.wait(hand.index(3), (i & 1) ^ 1)\n            results.permute((1, 0)).store(du.to(dtype))\n"
LAST = "            own = warpgroup_mma_wait(0, deps=[own])\n            if phase > 0:\n"
FREED = "            mbarrier.arrive(free.index({}), count=1)\n"
STATE_READ = "            x_q = warpgroup_mma_wait(2 if DELTA else 1, deps=[x_q])\n"
MASKED = "    copy(buffer, at, (r < rows)[:, None] & (c < columns)[None, :])\n"
DECAY = """            factor = decay(gate_places.index(s))
            if HAS_INITIAL and (KEY or VALUE):
                s0 = settle(s0, column, row, row_places.index(s), factor, KEY, VALUE)
                if"""
# The module, what stands in it, what is put there, and what the emulator must say (None: nothing, but the numbers are wrong).
FAULTS: dict[str, tuple[str, str, str, str | None]] = {
    "a place is filled before it is free": ("_walks", "        mbarrier.wait(free.index(s), turn ^ 1)\n", "", "race"),
    "a place is freed too early": ("_walks", LAST, FREED.format("s") + LAST, "race|arrivals"),
    "nobody says that a place is full": (
        *("_walks", "        async_copy.mbarrier_arrive(full.index(s), increment_count=False)\n"),
        *("", "deadlock"),
    ),
    "states are not shown to tensor cores": ("_gradients", STATES, STATES.splitlines(keepends=True)[0], "fence"),
    "results are stored before they were made": (
        "_walks",
        "        mbarrier.wait(hand.index(2), i & 1)\n        if",
        "        if",
        "before",
    ),
    "results are made over unstored ones": ("_walks", RESULTS, RESULTS.splitlines(keepends=True)[1], "race"),
    "a product is used too early": (
        "_walks",
        "_wait(phase + 2, deps=[y])",
        "_wait(phase + 3, deps=[y])",
        "before warpgroup_mma_wait",
    ),
    "a barrier is waited for at the wrong turn": (
        "_gradients",
        STATES,
        STATES.replace("i & 1", "(i & 1) ^ 1"),
        "before|race|deadlock",
    ),
    "states are freed too early": ("_gradients", STATE_READ, FREED.format(2) + STATE_READ, "race|arrivals"),
    "gradients are overwritten unstored": ("_gradients", "            mbarrier.wait(free.index(3), (i & 1) ^ 1)\n", "", "race"),
    "tokens past the end are read": ("_tiles", MASKED, MASKED.replace("(r < rows)[:, None] & ", ""), "address"),
    "locked columns are read": ("_tiles", MASKED, MASKED.replace(" & (c < columns)[None, :]", ""), None),
    "two programs store one tile": ("_walks", "(lane % H).to(gl.int64), tile", "(lane % H * 0).to(gl.int64), tile", "twice"),
    "a chunk's decay is left out": ("_walks", DECAY, DECAY.replace("decay(gate_places.index(s))", "1.0"), None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_kernels_is_found(name, emulated):
    module, old, new, said = FAULTS[name]
    emulated(edits=((module, old, new),))
    case = CASES["unlocks in a chunk, keys"] | {"initial": True}
    if said is None:
        assert errors("comba", case) != {}
    else:
        with pytest.raises(EmulationError, match=said):
            errors("comba", case)
