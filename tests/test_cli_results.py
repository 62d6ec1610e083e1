"""What `proteus eval --suite` leaves is never less than what was there, and a report says of which checkpoint it is."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from proteus_lm.cli import main
from proteus_lm.data.prepare import prepare
from proteus_lm.evals import suite as suites
from proteus_lm.evals.suite import Score, SuiteResult

SCORED = SuiteResult("fig2", "m", "c", tuple(Score("swde", str(n), 50.0, 1.0, 200, 0, "1", "d") for n in (1, 2, 3, 4)))


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with the recipe of a tiny model, and a run of it."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "texts").mkdir()
    for i in range(12):
        (folder / "texts" / f"{i}.txt").write_text(
            f"{i}. " + f"It was the year {i} of the memory, and all was as it had been. " * 8
        )
    prepare(folder / "texts", "byte", folder / "data", validation_fraction=0.3, progress=False)
    recipe = {
        "model": {
            "mixer": "titans",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_heads": 2,
            "memory_blocks": 4,
            "chunk_size": 16,
        },
        "data": {"path": f"{folder}/data", "context": 64},
        "train": {"steps": 6, "batch_size": 2, "threads": 1, "validate_tokens": 0, "device": "cpu", "tensorboard": False},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", f"{folder}/run.yaml", "--out", f"{folder}/run"]) == 0
    return folder


def test_a_suite_in_which_nothing_ran_is_an_error_that_says_what_was_missing_and_writes_nothing(work, capsys, tmp_path):
    arguments = ["eval", f"{work}/run", "--suite", "fig2", "--tasks", "squad_completion", "--lengths", "512", "--offline"]
    for before in (None, SCORED):
        if before is not None:
            before.save(tmp_path / "fig2.json")
        for extra in ([], ["--overwrite"]):
            assert main([*arguments, "--out", str(tmp_path), *extra]) == 2
            error = capsys.readouterr().err
            assert "nothing of fig2 ran, and nothing is written: squad_completion 512: " in error
            assert "offline was asked for" in error and "--data DIR" in error
            found = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
            assert found == ({} if before is None else {"fig2.json": before.to_dict()})


def test_a_result_of_fewer_samples_is_written_beside_what_is_there_and_a_fuller_one_or_overwrite_in_its_place(
    work, capsys, monkeypatch, tmp_path
):
    def suite(model, options):
        return replace(SCORED, scores=tuple(replace(score, count=options.limit or 200) for score in SCORED.scores))

    def counts():
        return {path.name: SuiteResult.load(path).scores[0].count for path in sorted(tmp_path.iterdir())}

    monkeypatch.setattr(suites, "SUITES", {"fig2": suite})
    arguments = ["eval", f"{work}/run", "--suite", "fig2", "--out", str(tmp_path)]
    assert main([*arguments, "--limit", "9"]) == 0
    assert main(arguments) == 0
    assert counts() == {"fig2.json": 200}
    assert "stays" not in capsys.readouterr().err
    assert main([*arguments, "--limit", "2"]) == 0
    shown = capsys.readouterr()
    says = (
        "fig2.json holds more (swde 1: 200 samples, not 2; swde 2: 200 samples, not 2; and 2 more) and stays; this result goes to "
    )
    assert f"{says}{tmp_path}/fig2.2.json. To replace it, use --overwrite" in shown.err
    assert f"written    {tmp_path}/fig2.2.json" in shown.out
    assert main([*arguments, "--limit", "1"]) == 0
    assert counts() == {"fig2.2.json": 2, "fig2.3.json": 1, "fig2.json": 200}
    assert main([*arguments, "--limit", "2", "--overwrite"]) == 0
    assert counts()["fig2.json"] == 2


def test_a_file_that_is_no_result_at_the_place_of_one_is_known_before_the_work(work, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(suites, "SUITES", {"fig2": lambda model, options: pytest.fail("worked in vain")})
    (tmp_path / "fig2.json").write_text("mine")
    assert main(["eval", f"{work}/run", "--suite", "fig2", "--out", str(tmp_path)]) == 2
    assert "fig2.json is there and is no result of a suite; it is left alone: choose another --out" in capsys.readouterr().err
    assert (tmp_path / "fig2.json").read_text() == "mine"


def shown(report: Path) -> str:
    return (report / "paper.md").read_text()


def test_a_report_says_of_which_checkpoint_a_result_is_where_it_is_not_the_newest(work, capsys, tmp_path):
    run, report = tmp_path / "again", ["report", f"{tmp_path}/again", "--only-suites", "--out", f"{tmp_path}/report"]
    train = ["train", f"{work}/run.yaml", "--out", str(run), "--set", "train.save_every=2", "train.keep=9"]
    assert main([*train, "train.steps=4"]) == 0
    assert main(["eval", str(run), "--suite", "fig4", "--lengths", "256"]) == 0
    assert main(report) == 0
    assert "again (step" not in shown(tmp_path / "report")
    assert main([*train, "train.steps=6"]) == 0
    assert main(report) == 0
    assert "| again (step-00000004; newest: step-00000006) |" in shown(tmp_path / "report")
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    assert main(report) == 0
    assert "| again (step-00000004, gone; newest: step-00000006) |" in shown(tmp_path / "report")
    saved = json.loads((run / "evals" / "fig4.json").read_text())
    del saved["extra"]["provenance"]["checkpoint"]  # as results were written before
    (run / "evals" / "fig4.json").write_text(json.dumps(saved))
    assert main(report) == 0
    assert f"| again (made of {run} (step-00000004), weights not recorded) |" in shown(tmp_path / "report")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("train.seed=3", r"trainer\.json of \S+step-00000006 has another SHA-256 than the \w{12} it"),
        ("model.chunk_size=8", "chunk_size is 16 there and 8 here"),
    ],
)
def test_a_report_refuses_results_of_a_model_that_is_not_the_runs_any_more(work, capsys, tmp_path, change, says):
    run = shutil.copytree(work / "run", tmp_path / "run")
    assert main(["eval", str(run), "--suite", "fig4", "--lengths", "256"]) == 0
    shutil.rmtree(run / "checkpoints")
    assert main(["train", f"{work}/run.yaml", "--out", str(run), "--set", change]) == 0
    capsys.readouterr()
    assert main(["report", str(run), "--only-suites", "--out", f"{tmp_path}/report"]) == 2
    error = capsys.readouterr().err
    assert re.search(rf"evals/fig4\.json is not of the model that is in \S+ now \(.*{says}.* again, or remove the file", error)
    assert not (tmp_path / "report").exists()
