"""Wrong inputs are clear errors before the first step, and leave no run behind."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch

from proteus_lm.model import ProteusForCausalLM
from proteus_lm.train.loop import train
from proteus_lm.train.recipe import RecipeError, TrainRecipe
from proteus_lm.train.setup import choose_device


def test_cuda_that_is_not_here_is_an_error_with_a_remedy(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RecipeError, match="no CUDA device; use auto or cpu"):
        choose_device(TrainRecipe(steps=1, device="cuda"))
    assert choose_device(TrainRecipe(steps=1, device="auto")).type == "cpu"


def test_bf16_on_a_device_without_it_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Old GPU")
    with pytest.raises(RecipeError, match="Old GPU does not support"):
        choose_device(TrainRecipe(steps=1, precision="bf16"))
    assert choose_device(TrainRecipe(steps=1, precision="fp32")).type == "cuda"


def test_a_vocabulary_smaller_than_the_tokenizer_is_an_error(recipe, tmp_path):
    with pytest.raises(RecipeError, match=r"model\.vocab_size is 256.*has 257 tokens"):
        train(recipe(vocab_size=256), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_end_token_than_that_of_the_data_is_an_error_with_both(recipe, tmp_path):
    with pytest.raises(RecipeError, match=r"model\.eos_token_id is 5, but documents of \S+ end with token 256"):
        train(recipe(eos_token_id=5), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert train(recipe(eos_token_id=256, steps=1), tmp_path / "run").load_model().config.eos_token_id == 256


def test_a_seed_that_no_generator_takes_is_an_error(recipe):
    with pytest.raises(RecipeError, match=r"train\.seed is 18446744073709551616; it must be 0 to 2\*\*64 - 1"):
        recipe(seed=2**64)


def test_wandb_that_is_not_installed_is_said_before_anything_is_written(recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"proteus-lm\[wandb\]"):
        train(recipe(wandb="memory"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_ids_outside_the_vocabulary_name_the_shard_and_the_remedy(recipe, data, tmp_path, monkeypatch):
    monkeypatch.setattr("proteus_lm.data.dataset.COMPARED", 0)  # as for a large split
    shutil.copytree(data, tmp_path / "data")
    shard = next((tmp_path / "data/train").glob("*.bin"))
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    with pytest.raises(
        ValueError, match=rf"{shard.name} is damaged: it holds the id 65535, .* 257 tokens\. .*prepare with overwrite"
    ):
        train(recipe(path=str(tmp_path / "data")), tmp_path / "run")


def test_a_wider_vocabulary_is_kept(recipe, tmp_path):
    run = train(recipe(vocab_size=300, steps=1), tmp_path / "run")
    assert run.load_model().config.vocab_size == 300


def test_a_context_longer_than_every_document_is_an_error_unless_allowed(recipe, tmp_path):
    with pytest.raises(ValueError, match=r"context of 900 tokens is longer than any document.*allow_short_documents"):
        train(recipe(context=900), tmp_path / "run")
    run = train(recipe(context=900, allow_short_documents=True, positions="window", steps=1), tmp_path / "run")
    assert run.metrics()[0]["tokens"] == 4 * 900


def test_a_folder_without_data_is_an_error_that_names_it(recipe, tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing-here"):
        train(recipe(path=str(tmp_path / "nothing-here")), tmp_path / "run")


def test_a_tokenizer_that_did_not_make_the_shards_is_an_error(recipe, data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    tokenizer = json.loads((tmp_path / "data/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "data/tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises((RecipeError, ValueError), match=r"tokenizer\.json .* is not the tokenizer that made the shards"):
        train(recipe(path=str(tmp_path / "data")), tmp_path / "run")


def test_a_truncated_shard_is_an_error(recipe, data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    shard = next((tmp_path / "data/train").glob("*.bin"))
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(ValueError, match=shard.name):
        train(recipe(path=str(tmp_path / "data")), tmp_path / "run")


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_changed_shard_is_an_error_before_a_run_begins_and_when_it_goes_on(recipe, data, tmp_path, split):
    shutil.copytree(data, tmp_path / "data")
    train(recipe(path=str(tmp_path / "data")), tmp_path / "run", stop_at=2)
    shard = next((tmp_path / "data" / split).glob("*.bin"))
    shard.write_bytes(b"A\0" * 20 + shard.read_bytes()[40:])
    for run in ("run", "new"):
        with pytest.raises(ValueError, match=rf"{split}/{shard.name} is damaged: its SHA-256 is not the manifest's"):
            train(recipe(path=str(tmp_path / "data")), tmp_path / run)
    assert not (tmp_path / "new").exists()


def test_moved_data_are_the_same_data_and_other_data_are_not(recipe, data, tmp_path):
    train(recipe(), tmp_path / "run", stop_at=2)
    shutil.copytree(data, tmp_path / "moved")
    assert train(recipe(path=str(tmp_path / "moved")), tmp_path / "run", stop_at=3).steps[-1] == 3
    manifest = json.loads((tmp_path / "moved/manifest.json").read_text())
    manifest["source"] = {"kind": "another"}
    (tmp_path / "moved/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RecipeError, match=r"the data \(hash of the manifest"):
        train(recipe(path=str(tmp_path / "moved")), tmp_path / "run")


def test_blocks_that_training_never_opens_are_said(recipe, tmp_path, capsys):
    options = {"mixer": "comba", "memory_blocks": 8, "steps": 1}
    train(recipe(**options, context=4), tmp_path / "short")
    assert "warning: 4 of 8 blocks of memory open at position 4 or later" in capsys.readouterr().out
    train(recipe(**options, context=32), tmp_path / "long")
    assert "warning" not in capsys.readouterr().out


def test_parameters_without_a_gradient_are_said(recipe, tmp_path, capsys, monkeypatch):
    forward = ProteusForCausalLM.forward

    def cut(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.loss = self.lm_head.weight.square().sum()
        return output

    monkeypatch.setattr(ProteusForCausalLM, "forward", cut)
    train(recipe(steps=1), tmp_path / "run")
    assert "the loss does not depend on embed_tokens.weight, layers.0" in capsys.readouterr().out


def test_an_unknown_way_to_resume_names_the_choices(recipe, tmp_path):
    with pytest.raises(ValueError, match="auto, never, restart"):
        train(recipe(), tmp_path / "run", resume="perhaps")
