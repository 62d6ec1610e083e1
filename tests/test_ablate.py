"""Ablation over a key with seeds: runs made once, differences paired by seed, wrong plans refused before any work."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from proteus_lm import ablate as module
from proteus_lm.ablate import Ablation, ablate, parse_over, summarise
from proteus_lm.data.prepare import prepare
from proteus_lm.evals.suite import SuiteResult
from proteus_lm.run import Run
from proteus_lm.train.recipe import RecipeError


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ablate")
    (folder / "texts").mkdir()
    for i in range(12):
        (folder / "texts" / f"{i}.txt").write_text(
            f"{i}. " + f"It was the year {i} of the memory, and all was as it had been. " * 4
        )
    prepare(folder / "texts", "byte", folder / "data", validation_fraction=0.3, progress=False)
    recipe = {
        "model": {"mixer": "deltanet", "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2},
        "data": {"path": f"{folder}/data", "context": 32},
        "train": {"steps": 3, "batch_size": 2, "threads": 1, "device": "cpu", "validate_tokens": 0, "tensorboard": False},
    }
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def plan(work, **changes):
    return Ablation(**{"recipe": work / "r.yaml", "key": "model.memory_blocks", "values": (1, 4), "seeds": (0, 1), **changes})


@pytest.fixture(scope="module")
def done(work):
    return ablate(plan(work), work / "out", made_by="proteus ablate r.yaml", say=lambda text: None)


def test_each_value_is_trained_with_each_seed_and_nothing_else_differs(work, done):
    runs = {(v, s): Run.open(work / "out" / f"memory_blocks-{v}-seed-{s}") for v in (1, 4) for s in (0, 1)}
    for (blocks, seed), run in runs.items():
        made = run.recipe.to_dict()
        assert (made["model"].pop("memory_blocks"), made["train"].pop("seed")) == (blocks, seed)
        other = runs[1, 0].recipe.to_dict()
        other["model"].pop("memory_blocks")
        other["train"].pop("seed")
        assert made == other


def test_the_rows_are_the_runs_own_validation_losses(work, done):
    from proteus_lm.evals import evaluate

    row = next(r for r in done.extra["rows"] if (r["value"], r["seed"]) == ("4", 1))
    run = Run.open(row["run"])
    loss = evaluate(run.load_model(), run.dataset("validation"), context=32, max_tokens=65536).whole.mean
    assert row["loss"] == pytest.approx(loss, rel=1e-9)
    assert row["step"] == 3


def test_what_is_finished_is_used_as_it_is_and_gives_the_same_result(work, done, monkeypatch):
    monkeypatch.setattr(module, "train", lambda *a, **k: pytest.fail("a finished run was trained again"))
    monkeypatch.setattr(module, "evaluate", lambda *a, **k: pytest.fail("a measured run was measured again"))
    again = ablate(plan(work), work / "out", made_by="proteus ablate r.yaml", say=lambda text: None)
    assert again.to_dict() == done.to_dict()


def test_a_damaged_measurement_is_made_again(work, done):
    kept = work / "out" / "memory_blocks-1-seed-0" / "evals" / module.MEASURED
    before = kept.read_text()
    for damage in ("{", "[]", "{}", "\N{REPLACEMENT CHARACTER}"):
        kept.write_text(damage)
        assert ablate(plan(work), work / "out", made_by="proteus ablate r.yaml", say=lambda text: None).to_dict() == done.to_dict()
    assert json.loads(kept.read_text()) == json.loads(before)


def test_a_run_that_stopped_goes_on_and_one_more_value_trains_that_alone(work, done, monkeypatch):
    trained = []
    real = module.train
    monkeypatch.setattr(module, "train", lambda recipe, folder: trained.append(folder.name) or real(recipe, folder))
    real(plan(work, values=(2,)).load(2, 0), work / "out" / "memory_blocks-2-seed-0", stop_at=2)
    wider = ablate(plan(work, values=(1, 2, 4)), work / "out", made_by="proteus ablate r.yaml", say=lambda text: None)
    assert trained == ["memory_blocks-2-seed-0", "memory_blocks-2-seed-1"]
    assert [row["step"] for row in wider.extra["rows"]] == [3] * 6


def test_table_figure_page_and_raw_rows_are_written(work, done):
    out = work / "out"
    assert {"fig3.json", "ablation.md", "ablation.html", "ablation.png"} <= {p.name for p in out.iterdir()}
    saved = SuiteResult.load(out / "fig3.json")
    assert saved.suite == "fig3"
    provenance = saved.extra["provenance"]
    assert {"torch", "python"} <= provenance["versions"].keys()
    assert provenance["recipe"]["model"]["mixer"] == "deltanet"
    assert "proteus ablate r.yaml" in (out / "ablation.md").read_text()
    assert "data:image/png" in (out / "ablation.html").read_text()


def rows(losses):
    return [{"value": v, "seed": s, "loss": x, "tokens": 10} for (v, s), x in losses.items()]


def test_differences_are_paired_by_seed(work):
    losses = {("1", 0): 2.0, ("1", 1): 3.0, ("1", 2): 4.0, ("4", 0): 1.9, ("4", 1): 2.89, ("4", 2): 3.91}
    found = summarise(plan(work, seeds=(0, 1, 2)), rows(losses))
    (pair,) = found.extra["paired"]
    assert pair["mean"] == pytest.approx(-0.1)
    assert pair["half_width"] == pytest.approx(4.303 * 0.01 / 3**0.5, rel=1e-3)
    assert pair["verdict"] == "better"  # although the losses of one value spread over two nats
    assert found.extra["values"][0]["half_width"] > 1
    assert found.score("model.memory_blocks=4", "loss").count == 3


def test_it_can_say_worse_or_nothing(work):
    base = {("1", s): 2.0 for s in (0, 1, 2)}
    worse = {("4", s): 2.1 + 0.001 * s for s in (0, 1, 2)}
    noise = {("4", 0): 2.1, ("4", 1): 1.9, ("4", 2): 2.01}
    verdicts = [
        summarise(plan(work, seeds=(0, 1, 2)), rows(base | other)).extra["paired"][0]["verdict"] for other in (worse, noise)
    ]
    assert verdicts == ["worse", "no difference beyond the noise"]


def test_one_seed_gives_no_interval_and_says_so(work):
    from proteus_lm.report.suite_tables import ablation_table

    found = summarise(plan(work, seeds=(0,)), rows({("1", 0): 2.0, ("4", 0): 1.9}))
    assert found.extra["paired"][0]["verdict"] == "one seed: no verdict"
    assert "one seed: no interval" in ablation_table(found)
    assert json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("model.memory_blocks=1,4,8", "model.memory_blocks", (1, 4, 8)),
        ("train.lr=1.0e-3,0.002", "train.lr", (1e-3, 2e-3)),
        ("model.mixer=comba,titans", "model.mixer", ("comba", "titans")),
        ("model.memory_unlocks=[0, 4],[0, 8]", "model.memory_unlocks", ([0, 4], [0, 8])),
    ],
)
def test_over_is_a_key_and_its_values(text, key, values):
    assert parse_over(text) == (key, values)


@pytest.mark.parametrize("text", ["model.memory_blocks", "memory_blocks=1,2", "model.x=[1,"])
def test_over_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match="--over"):
        parse_over(text)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"values": ()}, "values are none"),
        ({"values": (4, 4)}, "each once"),
        ({"seeds": (1, 1)}, "seeds are 1, 1"),
        ({"key": "train.seed"}, "cannot be the key"),
        ({"overrides": ("model.memory_blocks=2",)}, "which this ablation sets itself"),
        ({"overrides": ("train.seed=2",)}, "which this ablation sets itself"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"context": 0}, "context is 0; it must be at least 1"),
    ],
)
def test_plans_that_make_no_sense_are_refused(work, changes, says):
    with pytest.raises(ValueError, match=says):
        plan(work, **changes)


def test_a_value_that_cannot_be_is_refused_before_anything_is_trained(work):
    with pytest.raises(RecipeError, match="memory_blocks"):
        plan(work, values=(1, 1000))
    with pytest.raises(RecipeError, match="did you mean"):
        plan(work, key="model.memory_block")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"key": "data.context", "values": (32, 60000)},
            r"data\.context = 60000, seed 0: the context of 60000 tokens is longer than",
        ),
        ({"key": "train.batch_size", "values": (2, 100000)}, r"train\.batch_size = 100000, seed 0: .* fewer than one global batch"),
        ({"key": "model.vocab_size", "values": (257, 100)}, r"model\.vocab_size = 100, seed 0: .* has 257 tokens"),
        ({"key": "train.device", "values": ("cpu", "cuda")}, r"train\.device = cuda, seed 0: .* sees no CUDA device"),
        ({"context": 1000}, r"--context 1000 reads 32001 tokens in a window, but the longest document of the validation split"),
        ({"overrides": ("data.path=nothing-here",)}, "nothing-here"),
    ],
)
def test_what_machine_recipe_and_data_do_not_allow_is_known_before_anything_is_trained(work, tmp_path, monkeypatch, changes, says):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(module, "train", lambda *a, **k: pytest.fail("trained"))
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        ablate(plan(work, **changes), tmp_path / "out", say=lambda text: None)
    assert not (tmp_path / "out").exists()


def test_data_without_a_validation_split_are_refused_before_anything_is_trained(work, tmp_path, monkeypatch):
    prepare(work / "texts", "byte", tmp_path / "data", validation_fraction=0, progress=False)
    monkeypatch.setattr(module, "train", lambda *a, **k: pytest.fail("trained"))
    with pytest.raises(RecipeError, match=r"seed 0: .* has no split 'validation'"):
        ablate(plan(work, overrides=(f"data.path={tmp_path}/data",)), tmp_path / "out", say=lambda text: None)


def test_runs_trained_on_other_data_at_the_same_place_are_refused_before_anything_is_trained(work, tmp_path, monkeypatch):
    shutil.copytree(work / "data", tmp_path / "data")
    on_copy = {"overrides": (f"data.path={tmp_path}/data",), "seeds": (0,)}
    ablate(plan(work, values=(1,), **on_copy), tmp_path / "out", say=lambda text: None)
    prepare(work / "texts", "byte", tmp_path / "data", validation_fraction=0.5, progress=False, overwrite=True)
    monkeypatch.setattr(module, "train", lambda *a, **k: pytest.fail("trained"))
    with pytest.raises(
        RecipeError, match=r"blocks-1-seed-0 was trained on other data \(the data .*: \w{12} in the run, \w{12} at .*--out"
    ):
        ablate(plan(work, values=(4, 1), **on_copy), tmp_path / "out", say=lambda text: None)


@pytest.mark.parametrize("other", ["checkpoint", "data"])
def test_a_measurement_of_another_checkpoint_or_of_other_data_is_made_again(work, tmp_path, done, other):
    run = shutil.copytree(work / "out" / "memory_blocks-1-seed-0", tmp_path / "run")
    kept = run / "evals" / module.MEASURED
    content = json.loads(kept.read_text())
    kept.write_text(json.dumps(content | {"found": content["found"] | {"loss": -1.0}}))
    assert module._measure(plan(work), run, "cpu")["loss"] == -1  # nothing has changed: it is read
    if other == "checkpoint":
        shutil.rmtree(run / "checkpoints")
        shutil.copytree(work / "out" / "memory_blocks-1-seed-1" / "checkpoints", run / "checkpoints")
    else:
        prepare(work / "texts", "byte", tmp_path / "data", validation_fraction=0.5, progress=False)
        recipe = run / "recipe.yaml"
        recipe.write_text(recipe.read_text().replace(f"{work}/data", f"{tmp_path}/data"))
    assert module._measure(plan(work), run, "cpu")["loss"] > 0


def test_runs_of_another_recipe_in_the_folder_are_refused_before_anything_is_trained(work, done, monkeypatch):
    monkeypatch.setattr(module, "train", lambda *a, **k: pytest.fail("trained"))
    with pytest.raises(RecipeError, match=r"train\.lr: .* there, .* asked for"):
        ablate(plan(work, values=(8, 1), overrides=("train.lr=5.0e-4",)), work / "out", say=lambda text: None)


def test_fields_that_do_not_change_what_is_learnt_may_differ(work, done, monkeypatch):
    monkeypatch.setattr(module, "train", lambda *a, **k: pytest.fail("trained"))
    ablate(plan(work, overrides=("train.log_every=2",)), work / "out", say=lambda text: None)
