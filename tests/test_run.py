"""A run directory is read by everything after training: what it gives, and how it says that something is missing."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from proteus_lm.data.files import file_sha256
from proteus_lm.data.prepare import prepare
from proteus_lm.data.synthesize import TaskSpec, synthesize
from proteus_lm.data.tokenizer import load_tokenizer
from proteus_lm.run import Run, checkpoint_path
from proteus_lm.train.loop import train
from proteus_lm.train.recipe import make_recipe


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps with checkpoints at 2 and 4."""
    folder = tmp_path_factory.mktemp("run")
    for name in ("a", "b", "c", "d", "e", "f", "g", "h"):
        (folder / "text").mkdir(exist_ok=True)
        (folder / "text" / f"{name}.txt").write_text(f"{name} memory is opened block by block as the text goes on. " * 4)
    prepare(folder / "text", "byte", folder / "data", validation_fraction=0.5, workers=0, progress=False)
    recipe = make_recipe(
        {
            "model": {
                "mixer": "comba",
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_heads": 2,
                "memory_blocks": 4,
            },
            "data": {"path": str(folder / "data"), "context": 32},
            "train": {"steps": 4, "batch_size": 2, "save_every": 2, "device": "cpu", "validate_tokens": 64, "tensorboard": False},
        }
    )
    train(recipe, folder / "run")
    return folder / "run"


@pytest.fixture
def copy(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def record(folder):
    """Make a checkpoint's record that of its files: what was changed is then no damage."""
    trainer = json.loads((folder / "trainer.json").read_text())
    trainer["files"] = {name: (folder / name).stat().st_size for name in trainer["files"]}
    trainer["sha256"] = {name: file_sha256(folder / name) for name in trainer["files"]}
    (folder / "trainer.json").write_text(json.dumps(trainer))


def test_a_run_gives_recipe_steps_metrics_data_tokenizer_and_model(finished):
    run = Run.open(finished)
    assert run.steps == [2, 4] and run.recipe.train.steps == 4 and run.recipe.model["memory_context"] == 32
    assert [r["step"] for r in run.metrics()] == [1, 2, 3, 4]
    assert run.dataset("validation").documents > 0
    assert run.tokenizer.decode(run.tokenizer.encode("block")) == "block"
    model = run.load_model()
    assert not model.training and model.config.memory_blocks == 4 and model.config.vocab_size == 257
    assert run.load_model(dtype=torch.bfloat16).get_input_embeddings().weight.dtype == torch.bfloat16


def test_the_model_of_a_step_has_the_weights_of_that_step(finished):
    run = Run.open(finished)
    for step in run.steps:
        saved = load_file(checkpoint_path(finished, step) / "model.safetensors")
        state = run.load_model(step).state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())
    assert not torch.equal(*(run.load_model(step).get_input_embeddings().weight for step in run.steps))


def test_a_checkpoint_is_a_hugging_face_folder(finished):
    run = Run.open(finished)
    model = AutoModelForCausalLM.from_pretrained(run.checkpoint())
    ids = AutoTokenizer.from_pretrained(run.checkpoint())("the block opens", return_tensors="pt").input_ids
    assert ids.tolist() == [run.tokenizer.encode("the block opens").tolist()]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, run.load_model()(ids).logits)


def test_no_folder_and_no_run_say_what_to_give(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        Run.open(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"is not a run: it holds no recipe\.yaml"):
        Run.open(tmp_path)


def test_a_run_without_a_checkpoint_still_gives_metrics(copy):
    shutil.rmtree(copy / "checkpoints")
    run = Run.open(copy)
    assert len(run.metrics()) == 4 and run.steps == []
    with pytest.raises(FileNotFoundError, match="has no checkpoint yet"):
        run.load_model()


def test_a_step_without_a_checkpoint_names_those_there_are(finished):
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 3; it has 2, 4"):
        Run.open(finished).load_model(3)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "trainer.json", "tokenizer.json"])
def test_a_missing_file_is_named_and_the_older_checkpoint_serves(copy, name, caplog):
    (checkpoint_path(copy, 4) / name).unlink()
    run = Run.open(copy)
    assert run.steps == [2] and run.checkpoint() == run.checkpoint() == checkpoint_path(copy, 2)
    assert [record.getMessage() for record in caplog.records] == [
        f"checkpoint {checkpoint_path(copy, 4)} is damaged ({name} is missing); an older one is used"
    ]
    with pytest.raises(ValueError, match=f"{name} is missing; complete checkpoints: 2"):
        run.load_model(4)


def test_a_truncated_checkpoint_is_named(copy):
    for step in (2, 4):
        path = checkpoint_path(copy, step) / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors has \d+ bytes of \d+; complete checkpoints: none"):
        Run.open(copy).load_model()


def test_weights_that_are_not_those_of_the_configuration_are_refused(copy):
    path = checkpoint_path(copy, 4) / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if tensors[name].dim() == 2)
    tensors[name + "x"] = tensors.pop(name)  # another name, as another version of the model would have
    save_file(tensors, path, metadata={"format": "pt"})
    record(checkpoint_path(copy, 4))
    with pytest.raises(ValueError, match=r"are not those of its config\.json"):
        Run.open(copy).load_model(4)


def test_a_checkpoint_of_another_configuration_is_one_line_that_names_weight_and_shapes(copy, capfd):
    path = checkpoint_path(copy, 4) / "config.json"
    path.write_text(path.read_text().replace('"hidden_size": 16', '"hidden_size": 32'))
    record(checkpoint_path(copy, 4))
    with pytest.raises(
        ValueError, match=r"mismatched keys, such as \S+ \[[\d, ]+\] \[[\d, ]+\]\. Put the config.*there are 2, 4\)$"
    ):
        Run.open(copy).load_model(4)
    assert "MISMATCH" not in "".join(capfd.readouterr())


def flip(path, place=-1):
    """One bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 0x40
    path.write_bytes(data)


def test_one_flipped_bit_is_named_and_the_older_checkpoint_serves(copy, caplog):
    flip(checkpoint_path(copy, 4) / "model.safetensors")
    run = Run.open(copy)
    assert run.checkpoint() == checkpoint_path(copy, 2)
    assert "step-00000004 is damaged (model.safetensors is not what was written (its SHA-256 differs))" in caplog.text
    says = r"model\.safetensors is not what was written .*; complete checkpoints: 2\. Use one of those, or copy this one again"
    with pytest.raises(ValueError, match=says):
        run.load_model(4)


def test_an_edited_configuration_is_no_checkpoint_of_the_run(copy):
    for step in (2, 4):
        path = checkpoint_path(copy, step) / "config.json"
        path.write_text(path.read_text().replace('"memory_blocks": 4', '"memory_blocks": 8'))
    with pytest.raises(ValueError, match=r"config\.json is not what was written .*; complete checkpoints: none"):
        Run.open(copy).load_model()


def test_a_checkpoint_of_before_the_checksums_opens(copy):
    trainer = checkpoint_path(copy, 4) / "trainer.json"
    older = json.loads(trainer.read_text())
    del older["sha256"]
    trainer.write_text(json.dumps(older))
    assert Run.open(copy).load_model(4).config.memory_blocks == 4


def test_weights_overwritten_with_something_else_are_refused(copy):
    path = checkpoint_path(copy, 4) / "model.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    record(checkpoint_path(copy, 4))
    with pytest.raises(ValueError, match="cannot be loaded"):
        Run.open(copy).load_model()


def test_data_of_another_tokenizer_are_refused_with_both_hashes(copy, tmp_path):
    source = tmp_path / "task"
    synthesize(TaskSpec("mqar", 16, 4, 16, 40, episodes=4), source, progress=False)
    text = (copy / "recipe.yaml").read_text()
    (copy / "recipe.yaml").write_text(text.replace(f"{Run.open(copy).recipe.data.path}\n", f"{source}\n"))
    hashes = [load_tokenizer(name).hash[:12] for name in (source, "byte")]
    with pytest.raises(ValueError, match=rf"was made with the tokenizer .*{hashes[0]}.*, not with .*{hashes[1]}"):
        Run.open(copy).dataset("train")


def test_data_that_have_gone_are_named(copy):
    text = (copy / "recipe.yaml").read_text()
    (copy / "recipe.yaml").write_text(text.replace("/data\n", "/gone\n"))
    with pytest.raises(FileNotFoundError, match="gone any more; prepare"):
        Run.open(copy).dataset("train")
