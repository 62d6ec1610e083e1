"""Training end to end on small models: the same losses however it was stopped, and nothing lost when something goes wrong."""

from __future__ import annotations

import errno
import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from proteus_lm.evals.perplexity import evaluate
from proteus_lm.mixers import registry
from proteus_lm.model import ProteusForCausalLM
from proteus_lm.run import Run, checkpoint_path
from proteus_lm.train.checkpoint import CheckpointError
from proteus_lm.train.loop import train
from proteus_lm.train.metrics import Metrics
from proteus_lm.train.recipe import RecipeError, load_recipe
from proteus_lm.train.signals import TrainingInterrupted
from proteus_lm.train.step import NonFiniteError
from proteus_lm.train.trainer import Trainer
from tests.train.disk import fill, small_disk
from tests.train.processes import Training

TIMES = {"tokens_per_second"}


def learnt(run: Run) -> list[dict]:
    """Every record without what depends on the clock."""
    return [{key: value for key, value in record.items() if key not in TIMES} for record in run.metrics()]


def weights(run: Run, step: int | None = None) -> dict[str, torch.Tensor]:
    return load_file(run.checkpoint(step) / "model.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_learns_and_leaves_everything_a_run_has(recipe, tmp_path):
    run = train(recipe(steps=30, lr=1e-2, warmup=3, positions="window", tensorboard=True, save_every=10, keep=2), tmp_path / "run")
    records = run.metrics()
    assert [r["step"] for r in records] == list(range(1, 31))
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    assert records[-1]["tokens"] == 30 * 4 * 32
    assert {"perplexity", "lr", "gradient_norm", "tokens_per_second", "memory_norm"} <= records[1].keys()
    assert "memory_norm" not in records[0] and "validation_loss" in records[-1]
    assert run.steps == [20, 30]
    for name in ("recipe.yaml", "sessions.jsonl", "parameters.json", "tensorboard", "checkpoints"):
        assert (run.path / name).exists()
    session = json.loads((run.path / "sessions.jsonl").read_text())
    assert session["versions"]["torch"] and session["from_step"] == 0 and session["command"]
    assert run.recipe.model["vocab_size"] == 257 and os.path.isabs(run.recipe.data.path)
    assert "embed" in " ".join(json.loads((run.path / "parameters.json").read_text())["no_decay"])


def test_the_validation_loss_is_that_of_the_evaluation(recipe, tmp_path):
    run = train(recipe(steps=2, validate_tokens=200), tmp_path / "run")
    result = evaluate(run.load_model(), run.dataset("validation"), context=32, batch_size=4, max_tokens=200)
    assert run.metrics()[-1]["validation_loss"] == pytest.approx(result.whole.mean, rel=1e-6)


@pytest.mark.parametrize("mixer", sorted(registry))
def test_stopping_at_5_and_7_and_resuming_gives_the_losses_of_a_run_never_stopped(recipe, tmp_path, mixer):
    options = {"steps": 10, "mixer": mixer, "lr": 1e-2, "warmup": 2, "validate_every": 3}
    whole = train(recipe(**options), tmp_path / "whole")
    parts = tmp_path / "parts"
    for stop in (5, 7, None):
        run = train(recipe(**options), parts, stop_at=stop)
        assert run.steps[-1] == (stop or 10)
    assert learnt(run) == learnt(whole)
    assert equal(weights(run), weights(whole))


def test_resuming_is_exact_through_accumulation_and_between_two_saves(recipe, tmp_path, monkeypatch):
    options = {"steps": 9, "micro_batch_size": 1, "save_every": 4, "lr": 1e-2, "mixer": "comba", "memory_blocks": 4}
    whole = train(recipe(**options), tmp_path / "whole")

    def die(self, *args):
        if self.progress.step == 6:
            raise MemoryError("killed")
        return step(self, *args)

    step = Trainer._step
    monkeypatch.setattr(Trainer, "_step", die)
    with pytest.raises(MemoryError):
        train(recipe(**options), tmp_path / "parts")
    assert [r["step"] for r in Run.open(tmp_path / "parts").metrics()] == [1, 2, 3, 4, 5, 6]
    monkeypatch.setattr(Trainer, "_step", step)
    run = train(recipe(**options), tmp_path / "parts")
    assert learnt(run) == learnt(whole) and equal(weights(run), weights(whole))


def test_accumulated_micro_batches_give_the_gradient_of_the_whole_batch(recipe, tmp_path):
    one = train(recipe(lr=1e-2), tmp_path / "one")
    four = train(recipe(lr=1e-2, micro_batch_size=1), tmp_path / "four")
    for a, b in zip(one.metrics(), four.metrics()):
        # fp32 sums in another order, carried through six updates
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5) and a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-4)


def test_documents_reset_positions_and_accumulate_by_tokens(recipe, tmp_path):
    """With positions="document" micro-batches hold different numbers of predictions; the loss is still the mean over all."""
    options = {"positions": "document", "mixer": "comba", "memory_blocks": 4, "lr": 1e-2}
    one = train(recipe(**options), tmp_path / "one")
    four = train(recipe(**options, micro_batch_size=1), tmp_path / "four")
    window = train(recipe(**options | {"positions": "window"}), tmp_path / "window")
    assert one.metrics()[-1]["tokens"] < window.metrics()[-1]["tokens"]
    assert one.metrics()[-1]["validation_loss"] != window.metrics()[-1]["validation_loss"]
    for a, b in zip(one.metrics(), four.metrics()):
        assert a["tokens"] == b["tokens"] and a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_one_block_and_eight_begin_from_the_same_weights(recipe, tmp_path):
    runs = [train(recipe(steps=1, lr=1e-9, mixer="titans", memory_blocks=e), tmp_path / str(e)) for e in (1, 8)]
    first, second = (weights(run) for run in runs)
    assert all(torch.allclose(first[name], second[name], atol=1e-7) for name in first)


def test_a_run_killed_by_sigkill_and_resumed_gives_the_same_losses(recipe, tmp_path):
    options = {"steps": 5000, "save_every": 5, "threads": 1, "deterministic": True}
    child = Training(recipe(**options), tmp_path / "parts")
    child.wait_for_step(7)
    with pytest.raises(BlockingIOError, match="another process is training"):
        train(recipe(**options), tmp_path / "parts")
    child.process.kill()
    assert child.end() == -signal.SIGKILL
    done = Run.open(tmp_path / "parts").metrics()[-1]["step"]
    run = train(recipe(**options), tmp_path / "parts", stop_at=done + 6)
    whole = train(recipe(**options), tmp_path / "whole", stop_at=done + 6)
    assert [r["step"] for r in run.metrics()] == list(range(1, done + 7))
    assert learnt(run) == learnt(whole) and equal(weights(run), weights(whole))


def test_sigterm_finishes_the_step_saves_and_leaves_with_its_code(recipe, tmp_path):
    child = Training(recipe(steps=100_000, threads=1), tmp_path / "run")
    child.wait_for_step(3)
    child.process.terminate()
    assert child.end() == 128 + signal.SIGTERM, child.output
    run = Run.open(tmp_path / "run")
    last = run.metrics()[-1]["step"]
    assert run.steps == [last] and f"after step {last}, which is saved" in child.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_after_a_signal_its_handler_is_given_back_and_the_run_goes_on(recipe, tmp_path, monkeypatch, number):
    whole = train(recipe(), tmp_path / "whole")
    before, step = signal.getsignal(number), Trainer._step

    def interrupted(self):
        record = step(self)
        if record["step"] == 3:
            os.kill(os.getpid(), number)
        return record

    monkeypatch.setattr(Trainer, "_step", interrupted)
    with pytest.raises(TrainingInterrupted, match="after step 3") as error:
        train(recipe(), tmp_path / "run")
    assert error.value.code == 128 + number and signal.getsignal(number) is before
    monkeypatch.setattr(Trainer, "_step", step)
    assert learnt(train(recipe(), tmp_path / "run")) == learnt(whole)


def spoil(monkeypatch, at: int, times: int = 1, what: str = "loss"):
    """Make the loss of one step NaN, or only its gradient infinite."""
    forward, calls = ProteusForCausalLM.forward, [0]

    def spoilt(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        if self.training:
            calls[0] += 1
            if at <= calls[0] < at + times:
                if what == "loss":
                    output.loss = output.loss * float("nan")
                else:
                    output.loss.register_hook(lambda gradient: gradient * float("inf"))
        return output

    monkeypatch.setattr(ProteusForCausalLM, "forward", spoilt)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_numbers_that_are_not_finite_stop_before_the_update_with_the_batch_saved(recipe, tmp_path, monkeypatch, what):
    good = train(recipe(), tmp_path / "good", stop_at=3)
    spoil(monkeypatch, 4, what=what)
    with pytest.raises(NonFiniteError) as error:
        train(recipe(), tmp_path / "bad")
    run = Run.open(tmp_path / "bad")
    assert "step 4" in str(error.value) and "the gradient of " in str(error.value)
    assert run.steps == [3] and equal(weights(run), weights(good))
    assert [r["step"] for r in run.metrics()] == [1, 2, 3]
    saved = load_file(tmp_path / "bad/nonfinite/step-00000004-rank-0.safetensors")
    facts = json.loads((tmp_path / "bad/nonfinite/step-00000004-rank-0.json").read_text())
    assert saved["tokens"].shape == (4, 33) and facts["step"] == 4
    assert facts["first_parameter"] in dict(run.load_model().named_parameters())
    monkeypatch.undo()
    assert train(recipe(), tmp_path / "bad").steps[-1] == 6


def test_skip_nonfinite_leaves_the_update_out_counts_and_goes_on(recipe, tmp_path, monkeypatch):
    spoil(monkeypatch, 3, times=2)
    run = train(recipe(skip_nonfinite=True, save_every=1, keep=6, lr=1e-2), tmp_path / "run")
    assert equal(weights(run, 2), weights(run, 4)) and not equal(weights(run, 4), weights(run, 5))
    records = run.metrics()
    assert [r.get("skipped", 0) for r in records] == [0, 0, 1, 2, 2, 2]
    assert records[2]["loss"] is None and records[4]["lr"] < records[2]["lr"]  # the schedule advances
    spoilt = sorted(p.name for p in (run.path / "nonfinite").glob("*.json"))
    assert spoilt == ["step-00000003-rank-0.json", "step-00000004-rank-0.json"]


def test_a_failing_validation_does_not_lose_the_steps_before_it(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "_validate", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(recipe(steps=4), tmp_path / "run")
    assert Run.open(tmp_path / "run").steps == [4]


def test_another_model_context_seed_or_batch_is_refused_and_named(recipe, tmp_path):
    train(recipe(), tmp_path / "run", stop_at=2)
    before = (tmp_path / "run" / "recipe.yaml").read_text()
    with pytest.raises(RecipeError) as error:
        train(recipe(hidden_size=32, context=16, seed=1, batch_size=8), tmp_path / "run")
    for words in ("model.hidden_size: 16 in the run, 32", "data.context: 32", "train.seed: 0", "train.batch_size: 4"):
        assert words in str(error.value)
    assert (tmp_path / "run" / "recipe.yaml").read_text() == before


def test_other_settings_may_change_and_are_said(recipe, tmp_path, capsys):
    train(recipe(), tmp_path / "run", stop_at=2)
    run = train(recipe(steps=8, lr=5e-4), tmp_path / "run")
    said = capsys.readouterr().out
    assert "train.steps: 6 in the run, 8 in the recipe" in said and "train.lr" in said
    assert run.steps[-1] == 8 and run.recipe.train.steps == 8
    assert len((run.path / "sessions.jsonl").read_text().splitlines()) == 2


def test_a_run_that_is_there_is_refused_or_removed_only_when_asked(recipe, tmp_path):
    train(recipe(steps=2), tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds a run already"):
        train(recipe(steps=2), tmp_path / "run", resume="never")
    run = train(recipe(steps=3, seed=1), tmp_path / "run", resume="restart")
    assert run.steps == [3] and len(run.metrics()) == 3
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_restart_removes_what_was_found_of_the_run_before(recipe, tmp_path):
    train(recipe(steps=2), tmp_path / "run")
    for name in ("evals/fig4.json", "inspect/inspect.json"):
        (tmp_path / "run" / name).parent.mkdir()
        (tmp_path / "run" / name).write_text("{}")
    train(recipe(steps=2), tmp_path / "run")
    assert (tmp_path / "run" / "evals" / "fig4.json").exists()  # going on removes nothing
    train(recipe(steps=2), tmp_path / "run", resume="restart")
    assert not (tmp_path / "run" / "evals").exists() and not (tmp_path / "run" / "inspect").exists()


def test_a_folder_that_is_no_run_is_left_alone(recipe, tmp_path):
    (tmp_path / "photo.jpg").write_text("x")
    for resume in ("auto", "restart"):
        with pytest.raises(FileExistsError, match="is not a run"):
            train(recipe(), tmp_path, resume=resume)


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_file_where_the_run_should_go_is_named_and_left_alone(recipe, tmp_path, place):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match=r"cannot be a folder: a file stands at its place or above it; choose another"):
        train(recipe(), tmp_path / place)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_stop_before_the_first_step_is_refused_and_nothing_is_written(recipe, tmp_path):
    with pytest.raises(ValueError, match="stop_at is 0; it must be at least 1"):
        train(recipe(), tmp_path / "run", stop_at=0)
    assert not (tmp_path / "run").exists()


def test_a_finished_run_has_nothing_to_do(recipe, tmp_path, capsys):
    before = train(recipe(), tmp_path / "run").metrics()
    assert train(recipe(), tmp_path / "run").metrics() == before
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("stop_at", [None, 5])
def test_a_command_without_a_step_to_do_leaves_every_file_as_it_is(recipe, tmp_path, capsys, stop_at):
    run = train(recipe(steps=8, lr=5e-4), tmp_path / "run")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    again = train(recipe(steps=6 if stop_at is None else 10), tmp_path / "run", stop_at=stop_at)
    assert "nothing to do: the run is at step 8 of" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    assert (again.recipe.train.steps, again.recipe.train.lr) == (8, 5e-4)


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(recipe, tmp_path, capsys):
    whole = train(recipe(save_every=2, keep=3), tmp_path / "run")
    records = learnt(whole)
    path = checkpoint_path(tmp_path / "run", 6) / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    run = train(recipe(save_every=2, keep=3), tmp_path / "run")
    assert "damaged" in capsys.readouterr().out
    assert learnt(run) == records and run.steps == [2, 4, 6]


@pytest.mark.parametrize("checksums", [True, False])
def test_a_checkpoint_whose_configuration_is_not_the_recipes_is_refused(recipe, tmp_path, checksums):
    train(recipe(memory_blocks=4, mixer="comba"), tmp_path / "run", stop_at=2)
    folder = checkpoint_path(tmp_path / "run", 2)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"memory_blocks": 4', '"memory_blocks": 8'))
    says = r"config\.json is not what was written.*copy one again, or ask for a restart"
    if not checksums:  # a checkpoint of before them
        trainer = json.loads((folder / "trainer.json").read_text())
        del trainer["sha256"]
        (folder / "trainer.json").write_text(json.dumps(trainer))
        says = r"model\.memory_blocks: 8 in the run, 4 in the recipe\. .*its model is that of .*config\.json"
    with pytest.raises(ValueError, match=says):
        train(recipe(memory_blocks=4, mixer="comba"), tmp_path / "run")


def test_a_disk_that_fills_during_a_run_is_one_error_and_the_same_command_continues(recipe, tmp_path, monkeypatch, capfd):
    whole = train(recipe(steps=8, save_every=2, keep=1), tmp_path / "whole")
    write = Metrics.write

    def full(self, record):
        if record["step"] == 5:
            fill(tmp_path / "disk" / "ballast")
        write(self, record)

    with small_disk(tmp_path / "disk", "12m"):
        options = recipe(steps=8, save_every=2, keep=1, tensorboard=True)
        monkeypatch.setattr(Metrics, "write", full)
        with pytest.raises(CheckpointError, match=r"disk/run.* (free some|make) space and run the same command again to continue"):
            train(options, tmp_path / "disk" / "run")
        assert capfd.readouterr().err == ""
        monkeypatch.setattr(Metrics, "write", write)
        (tmp_path / "disk" / "ballast").unlink()
        assert Run.open(tmp_path / "disk" / "run").steps == [4]
        assert learnt(train(options, tmp_path / "disk" / "run")) == learnt(whole)


def test_a_full_disk_is_said_with_the_run_and_what_is_lost_whatever_was_being_written(recipe, tmp_path, monkeypatch):
    def full(self):
        if self._path.read_text().count("\n") > 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Metrics, "sync", full)
    with pytest.raises(CheckpointError, match=r"disk of \S+/run is full .*; nothing is lost but what came after step 4: free some"):
        train(recipe(save_every=2), tmp_path / "run")


def test_bf16_trains_with_fp32_weights(recipe, tmp_path):
    run = train(recipe(steps=20, lr=1e-2, precision="bf16"), tmp_path / "run")
    assert all(tensor.dtype == torch.float32 for tensor in weights(run).values())
    assert run.metrics()[-1]["loss"] < run.metrics()[0]["loss"] - 0.3


def test_gradient_checkpointing_changes_no_loss(recipe, tmp_path):
    plain = train(recipe(mixer="comba"), tmp_path / "plain")
    checkpointed = train(recipe(mixer="comba", gradient_checkpointing=True), tmp_path / "checkpointed")
    assert [r["loss"] for r in plain.metrics()] == pytest.approx([r["loss"] for r in checkpointed.metrics()], rel=1e-6)


def test_the_memory_norm_shows_locked_blocks_by_layer_and_block(recipe, tmp_path):
    run = train(recipe(mixer="comba", memory_blocks=4, num_hidden_layers=2, memory_context=32), tmp_path / "run")
    norms = torch.tensor(run.metrics()[-1]["memory_norm"])
    assert norms.shape == (2, 4) and (norms > 0).all()


def test_the_inner_gradient_of_a_titans_memory_is_logged_and_others_have_none(recipe, tmp_path):
    titans = train(recipe(mixer="titans", num_hidden_layers=2), tmp_path / "titans").metrics()[-1]["inner_gradient_norm"]
    assert len(titans) == 2 and min(titans) > 0
    assert train(recipe(mixer="comba"), tmp_path / "comba").metrics()[-1]["inner_gradient_norm"] == [0.0]


def test_threads_and_deterministic_mode_are_given_back(recipe, tmp_path):
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    train(recipe(threads=2, deterministic=False, steps=1), tmp_path / "run")
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def test_the_saved_recipe_trains_the_same_run_again(recipe, tmp_path):
    run = train(recipe(), tmp_path / "run")
    again = train(load_recipe(run.path / "recipe.yaml"), tmp_path / "again")
    assert learnt(again) == learnt(run)


@pytest.mark.slow
def test_compiled_training_gives_the_losses_of_eager_training(recipe, tmp_path):
    eager, compiled = (train(recipe(mixer="titans", compile=on), tmp_path / str(on)) for on in (False, True))
    # the compiler fuses fp32 operations, which rounds otherwise
    assert [r["loss"] for r in eager.metrics()] == pytest.approx([r["loss"] for r in compiled.metrics()], rel=1e-5)
