"""A checkpoint is there whole or not at all, and the last good one outlives every failure to write the next."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from proteus_lm.run import checkpoint_path, checkpoint_steps, damage
from proteus_lm.train import checkpoint as module
from proteus_lm.train.checkpoint import (
    CheckpointError,
    Progress,
    check_space,
    load_checkpoint,
    newest_complete,
    remove_leftovers,
    save_checkpoint,
)
from proteus_lm.train.optimizer import decay_groups, make_adamw
from proteus_lm.train.recipe import TrainRecipe
from tests.train.disk import small_disk


class Small(nn.Module):
    """What a checkpoint needs of a model: weights, and `save_pretrained`."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def save_pretrained(self, folder):
        save_file(dict(self.state_dict()), Path(folder) / "model.safetensors")


class NoTokenizer:
    def save(self, folder):
        (Path(folder) / "tokenizer.json").write_text("{}")


def make(seed=0, width=4):
    torch.manual_seed(seed)
    model = Small(width)
    groups = decay_groups(model)
    optimizer = make_adamw(groups, TrainRecipe(steps=9, lr=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer, groups


def save(run, step, parts=None, keep=2):
    model, optimizer, groups = parts or make()
    progress = Progress(step, step * 100, 1)
    return save_checkpoint(run, progress, model, optimizer, groups, NoTokenizer(), keep=keep, about={"recipe": {}})


def test_weights_moments_random_states_and_progress_come_back_bit_for_bit(tmp_path):
    parts = make()
    random.seed(3), np.random.seed(4), torch.manual_seed(5)
    torch.randn(3), np.random.randn(1), random.random()
    folder = save(tmp_path, 7, parts)
    expected = [torch.randn(4), torch.tensor(np.random.randn(4)), torch.tensor([random.gauss(0, 1)])]
    model, optimizer, groups = make(seed=1)
    assert load_checkpoint(folder, model, optimizer, groups) == Progress(7, 700, 1)
    for name, parameter in parts[0].named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
        for key, value in parts[1].state[parameter].items():
            assert torch.equal(value, optimizer.state[model.get_parameter(name)][key]), key
    found = [torch.randn(4), torch.tensor(np.random.randn(4)), torch.tensor([random.gauss(0, 1)])]
    assert all(torch.equal(a, b) for a, b in zip(expected, found))


def test_only_the_newest_stay_and_older_ones_go_last(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step, keep=2)
    assert checkpoint_steps(tmp_path) == [4, 5]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000004", "step-00000005"]


def test_nothing_is_removed_when_told_so(tmp_path):
    for step in range(1, 4):
        save(tmp_path, step, keep=None)
    assert checkpoint_steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("moment", ["model", "tokenizer", "optimizer", "trainer", "sync", "rename"])
def test_a_write_that_fails_leaves_the_checkpoint_before_it_and_no_rest(tmp_path, monkeypatch, moment):
    good = save(tmp_path, 1, keep=1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    target = {
        "model": (Small, "save_pretrained"),
        "tokenizer": (NoTokenizer, "save"),
        "optimizer": (module, "save_file"),
        "trainer": (Path, "write_text"),
        "sync": (os, "fsync"),
        "rename": (Path, "rename"),
    }[moment]
    with monkeypatch.context() as patch:
        patch.setattr(*target, full)
        if moment == "trainer":
            patch.setattr(NoTokenizer, "save", lambda self, folder: None)
        with pytest.raises(CheckpointError) as error:
            save(tmp_path, 2, keep=1)
    assert str(checkpoint_path(tmp_path, 2)) in str(error.value)
    assert "No space left" in str(error.value) and "MB are free" in str(error.value)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert damage(good) is None and newest_complete(tmp_path) == (good, [])
    assert save(tmp_path, 2, keep=1).exists()


def test_a_disk_that_is_really_full_keeps_the_checkpoint_before(tmp_path):
    disk = tmp_path / "disk"
    with small_disk(disk, "3m"):
        parts = make(width=384)  # 0.6 MB of weights, 1.8 MB a checkpoint: the second one does not fit
        good = save(disk, 1, parts, keep=1)
        with pytest.raises(CheckpointError, match="make space"):
            save(disk, 2, parts, keep=1)
        assert checkpoint_steps(disk) == [1] and damage(good) is None
        assert [p.name for p in (disk / "checkpoints").iterdir()] == ["step-00000001"]
        other = make(seed=1, width=384)
        assert load_checkpoint(good, *other).step == 1
        assert torch.equal(other[0].linear.weight, parts[0].linear.weight)


def test_too_little_space_is_said_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 3_000_000))
    check_space(tmp_path, Small(), 2)
    with pytest.raises(CheckpointError, match="3 MB free and 3 checkpoints"):
        check_space(tmp_path, Small(), 3)


def test_a_missing_and_a_truncated_file_are_seen_and_the_older_checkpoint_is_taken(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=None)
    (checkpoint_path(tmp_path, 3) / "optimizer.safetensors").unlink()
    weights = checkpoint_path(tmp_path, 2) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    folder, complaints = newest_complete(tmp_path)
    assert folder == checkpoint_path(tmp_path, 1)
    assert "optimizer.safetensors is missing" in complaints[0] and "model.safetensors has" in complaints[1]


def test_a_file_whose_content_changed_is_seen_and_its_checkpoint_never_outlives_a_good_one(tmp_path):
    for step in (1, 3):
        save(tmp_path, step, keep=None)
    moments = checkpoint_path(tmp_path, 3) / "optimizer.safetensors"
    data = bytearray(moments.read_bytes())
    data[-1] ^= 1
    moments.write_bytes(data)
    folder, (complaint,) = newest_complete(tmp_path)
    assert folder == checkpoint_path(tmp_path, 1) and complaint.endswith(
        "optimizer.safetensors is not what was written (its SHA-256 differs)"
    )
    save(tmp_path, 2, keep=1)  # the run goes on from 1
    assert newest_complete(tmp_path)[0] == checkpoint_path(tmp_path, 2)


def test_what_a_kill_left_half_written_is_no_checkpoint_and_goes(tmp_path):
    good = save(tmp_path, 1)
    shutil.copytree(good, good.with_name(".writing-step-00000002"))
    (good.with_name(".writing-step-00000002") / "trainer.json").unlink()
    shutil.copytree(good, good.with_name(".old-step-00000000"))
    assert checkpoint_steps(tmp_path) == [1]
    remove_leftovers(tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_the_checkpoint_of_another_model_is_refused(tmp_path):
    folder = save(tmp_path, 1, make(width=4))
    with pytest.raises(ValueError, match=r"(?s)cannot be continued from.*linear\.weight"):
        load_checkpoint(folder, *make(width=5))


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path):
    folder = save(tmp_path, 1)
    (folder / "model.safetensors").unlink()
    save(tmp_path, 1)
    assert damage(folder) is None
