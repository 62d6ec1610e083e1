"""Two processes with half the batch each learn what one process learns with the whole."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from proteus_lm.run import Run
from proteus_lm.train.loop import train
from proteus_lm.train.recipe import Recipe, RecipeError
from tests.train.processes import Training


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(recipe: Recipe, path: Path, world_size: int = 2) -> Run:
    common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    children = [Training(recipe, path, common | {"RANK": str(rank)}) for rank in range(world_size)]
    assert [child.end() for child in children] == [0] * world_size, [child.output for child in children]
    assert children[1].output == ""  # only the first process speaks
    return Run.open(path)


def test_two_processes_give_the_losses_of_one_with_the_same_batch(recipe, tmp_path):
    options = {"steps": 6, "lr": 1e-2, "positions": "document", "mixer": "comba", "validate_every": 3}
    two = run_ranks(recipe(**options), tmp_path / "two")
    one = train(recipe(**options), tmp_path / "one")
    assert [r["step"] for r in two.metrics()] == list(range(1, 7))
    for a, b in zip(one.metrics(), two.metrics()):
        assert a["tokens"] == b["tokens"]
        # fp32 sums in another order, carried through six updates
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-4)
    assert one.metrics()[-1]["validation_loss"] == pytest.approx(two.metrics()[-1]["validation_loss"], rel=1e-6)
    # and a run of one process goes on where two stopped: world size is no part of a run
    longer = train(recipe(**options | {"steps": 7}), tmp_path / "two")
    assert longer.steps[-1] == 7


def test_a_batch_that_the_processes_cannot_share_is_an_error(recipe, tmp_path, monkeypatch):
    from proteus_lm.train import ranks

    monkeypatch.setattr(ranks.Ranks, "start", classmethod(lambda cls, device: cls(0, 3, device)))
    with pytest.raises(RecipeError, match="over 3 processes is 1 rows each"):
        train(recipe(batch_size=4), tmp_path / "run")
