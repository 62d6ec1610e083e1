import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from proteus_lm import cli
from proteus_lm.cli import main

COMMANDS = ("prepare", "train", "eval", "generate", "report", "doctor")


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with prepared data and two tiny runs, E = 1 and E = 4, all made by the commands."""
    folder = tmp_path_factory.mktemp("work")
    texts = folder / "texts"
    texts.mkdir()
    for i in range(12):
        (texts / f"{i}.txt").write_text(f"{i}. " + f"It was the year {i} of the memory, and all was as it had been. " * 8)
    assert (
        main(["prepare", "--source", str(texts), "--tokenizer", "byte", "--out", f"{folder}/data", "--validation-fraction", "0.3"])
        == 0
    )
    recipe = {
        "model": {
            "mixer": "titans",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 2,
            "memory_expansion": 2,
            "chunk_size": 16,
        },
        "data": {"path": f"{folder}/data", "context": 64},
        "train": {"steps": 6, "batch_size": 2, "threads": 1, "validate_tokens": 256, "device": "cpu"},
    }
    for blocks in (1, 4):
        recipe["model"]["memory_blocks"] = blocks
        (folder / f"e{blocks}.yaml").write_text(yaml.safe_dump(recipe))
        assert (
            main(["train", f"{folder}/e{blocks}.yaml", "--out", f"{folder}/e{blocks}", "--set", "train.lr=1e-3", "train.seed=1"])
            == 0
        )
    return folder


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_names_every_option_of_every_command(command, capsys):
    assert main([*([command] if command else []), "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: proteus {command}".rstrip())
    if not command:
        assert all(name in shown for name in COMMANDS)


def test_help_needs_neither_torch_nor_transformers():
    # By path, because importing the package itself imports them.
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('cli', {cli.__file__!r})\n"
        "module = importlib.util.module_from_spec(spec); sys.modules['cli'] = module; spec.loader.exec_module(module)\n"
        f"for command in {COMMANDS!r}: assert module.main([command, '--help']) == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_installed_command_is_this_one():
    done = subprocess.run([Path(sys.executable).parent / "proteus", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "prepare" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "no-such.yaml"], "no recipe at no-such.yaml"),
        (["eval", "no-such-run"], "no folder no-such-run"),
        (["generate", "no-such-run", "--prompt", "a"], "no folder no-such-run"),
        (["generate", "no-such-run", "--prompt", ""], "gives no token; give at least one character"),
        (["generate", "no-such-run", "--prompt", "a", "--top-p", "2"], "top_p is 2.0; it must be"),
        (["report"], "no run to report"),
        (["report", "a", "--context", "512"], "'512' is not a length"),
        (["prepare", "--source", "no-such-file.txt", "--tokenizer", "byte", "--out", "d"], "no-such-file.txt"),
    ],
)
def test_a_wrong_input_is_one_line_with_code_two(arguments, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("proteus: error: ")
    assert error.count("\n") == 1
    assert says in error
    assert list(tmp_path.iterdir()) == []  # nothing half done is left


@pytest.mark.parametrize("arguments", [["trian"], ["train"], ["eval", "r", "--steps", "1"], ["eval", "r", "--step", "x"]])
def test_a_wrong_command_line_is_code_two(arguments, capsys):
    assert main(arguments) == 2
    assert "proteus" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["flag", "environment"])
def test_debug_shows_the_traceback(way, monkeypatch):
    if way == "environment":
        monkeypatch.setenv("PROTEUS_DEBUG", "1")
    with pytest.raises(FileNotFoundError):
        main(["eval", "no-such-run", *(["--debug"] if way == "flag" else [])])


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("proteus_lm.doctor.doctor", lambda: {}["missing"])
    with pytest.raises(KeyError):
        main(["doctor"])


def test_an_interrupt_exits_with_130(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("proteus_lm.doctor.doctor", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "proteus: interrupted\n"


def test_the_doctors_verdict_is_the_exit_code(monkeypatch):
    for code in (0, 1):
        monkeypatch.setattr("proteus_lm.doctor.doctor", lambda code=code: code)
        assert main(["doctor"]) == code


def test_a_reader_that_leaves_a_pipe_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m proteus_lm.cli doctor | head -n 1; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_set_takes_several_fields_and_can_be_repeated(work):
    from proteus_lm.run import Run

    out = f"{work}/set"
    arguments = ["train", f"{work}/e1.yaml", "--out", out, "--set", "train.steps=2", "train.lr=5e-4", "--set", "train.seed=7"]
    assert main(arguments) == 0
    train = Run.open(out).recipe.train
    assert (train.steps, train.lr, train.seed) == (2, 5e-4, 7)


def test_an_unknown_field_names_the_nearest_and_nothing_is_written(work, capsys):
    assert main(["train", f"{work}/e1.yaml", "--out", f"{work}/never", "--set", "train.learning_rat=1"]) == 2
    assert "learning_rat" in capsys.readouterr().err
    assert not Path(f"{work}/never").exists()


def test_eval_prints_the_loss_by_position_and_past_the_training_context(work, capsys):
    assert main(["eval", f"{work}/e4", "--context", "1x,2x", "--bins", "4"]) == 0
    shown = capsys.readouterr().out
    assert "context 1x: loss" in shown
    assert "bits per byte" in shown
    assert "| 48–63 |" in shown
    assert "| 112–127 |" in shown
    assert "past it" in shown
    assert "Left out" in shown


def test_eval_as_json_holds_the_same_numbers(work, capsys):
    assert main(["eval", f"{work}/e4", "--context", "1x", "128", "documents", "--max-tokens", "512", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["results"]) == ["1x", "128", "documents"]
    one = found["results"]["1x"]
    assert one["context"] == 64
    tokens = sum(b["tokens"] for b in one["bins"])
    assert tokens == one["loss"]["tokens"] <= 512
    mean = sum(b["mean"] * b["tokens"] for b in one["bins"]) / tokens
    assert mean == pytest.approx(one["loss"]["mean"], rel=1e-9)
    assert found["checkpoint"].endswith("step-00000006")


def test_eval_at_a_step_that_is_not_there_names_those_that_are(work, capsys):
    assert main(["eval", f"{work}/e4", "--step", "5"]) == 2
    assert "no checkpoint of step 5" in capsys.readouterr().err


def test_a_context_longer_than_any_document_is_a_clear_error(work, capsys):
    assert main(["eval", f"{work}/e4", "--context", "100x"]) == 2
    assert "no document holds 6401 tokens" in capsys.readouterr().err


def test_a_device_that_is_not_here_is_a_clear_error(work, capsys):
    assert main(["eval", f"{work}/e4", "--device", "warp"]) == 2
    assert "device 'warp' cannot be used here" in capsys.readouterr().err


def test_generate_prints_text_and_repeats_itself_with_the_same_seed(work, capsys, monkeypatch):
    arguments = ["generate", f"{work}/e4", "--max-new-tokens", "20", "--seed", "3", "--top-k", "20"]
    assert main([*arguments, "--prompt", "It was"]) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("It was"))
    assert main([*arguments, "--prompt", "-"]) == 0
    assert capsys.readouterr().out == first
    assert len(first) > 1
    assert (
        main(["generate", f"{work}/e4", "--prompt", "It was", "--temperature", "0", "--num-beams", "2", "--max-new-tokens", "5"])
        == 0
    )


def test_report_writes_tables_figures_and_numbers_that_agree(work, capsys):
    out = work / "report"
    assert main(["report", f"{work}/e1", f"{work}/e4", "--out", str(out), "--max-tokens", "1024", "--sample-tokens", "10"]) == 0
    shown = capsys.readouterr().out
    assert {p.name for p in out.iterdir()} == {"report.md", "report.json", "loss-by-position.png", "training.png", "memory.png"}
    raw = json.loads((out / "report.json").read_text())
    assert [run["memory_blocks"] for run in raw["runs"]] == [1, 4]
    assert raw["runs"][0]["parameters"] == raw["runs"][1]["parameters"]  # a schedule adds no parameter
    verdict = raw["differences"]["e4"]["1x"]["verdict"]
    assert verdict in shown
    assert verdict in (out / "report.md").read_text()
    losses = [run["evaluations"]["1x"]["loss"]["mean"] for run in raw["runs"]]
    assert raw["differences"]["e4"]["1x"]["whole"]["mean"] == pytest.approx(losses[1] - losses[0], abs=1e-9)
    assert "differ in `model.memory_blocks` alone" in shown
    assert f"Figure: {out / 'loss-by-position.png'}" in shown


def test_the_reports_memory_shows_locked_blocks_empty_until_they_open(work):
    out = work / "report-memory"
    assert main(["report", f"{work}/e1", f"{work}/e4", "--out", str(out), "--max-tokens", "256", "--sample-tokens", "0"]) == 0
    raw = json.loads((out / "report.json").read_text())
    memory = raw["runs"][1]["memory"]
    assert memory["unlock_positions"] == [0, 16, 32, 48]
    for tokens, opened, layers in zip(memory["tokens"], memory["open_blocks"], memory["norm_by_point_layer_block"]):
        assert opened == min(4, 1 + (tokens - 1) // 16)
        for blocks in layers:
            assert all(norm > 0 for norm in blocks[:opened])
            assert all(norm == 0 for norm in blocks[opened:])


def test_the_reports_own_commands_give_its_numbers_again(work, capsys):
    import shlex

    out = work / "report-again"
    assert main(["report", f"{work}/e4", "--out", str(out), "--max-tokens", "512", "--sample-tokens", "12"]) == 0
    run = json.loads((out / "report.json").read_text())["runs"][0]
    capsys.readouterr()
    assert main([*shlex.split(run["commands"]["evaluate"])[1:], "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["results"]
    assert again["1x"] == run["evaluations"]["1x"]
    assert again["2x"] == run["evaluations"]["2x"]
    assert main(shlex.split(run["commands"]["generate"])[1:]) == 0
    assert capsys.readouterr().out == run["sample"] + "\n"


def test_runs_that_cannot_be_compared_are_refused_before_any_work(work, capsys, monkeypatch):
    monkeypatch.setattr("proteus_lm.report.build.evaluate", lambda *a, **k: pytest.fail("it should not come to this"))
    for name, change in (("context", "data.context=32"), ("data", f"data.path={work}/other")):
        if name == "data":
            arguments = [
                "--source",
                f"{work}/texts",
                "--tokenizer",
                "byte",
                "--out",
                f"{work}/other",
                "--validation-fraction",
                "0.5",
            ]
            assert main(["prepare", *arguments]) == 0
        assert main(["train", f"{work}/e1.yaml", "--out", f"{work}/{name}-run", "--set", change, "train.steps=1"]) == 0
        capsys.readouterr()
        assert main(["report", f"{work}/e1", f"{work}/{name}-run", "--out", f"{work}/refused"]) == 2
        assert name in capsys.readouterr().err
    assert not (work / "refused").exists()


def test_a_report_without_matplotlib_says_what_to_install_before_any_work(work, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest))
    assert main(["report", f"{work}/e1", "--out", f"{work}/undrawn"]) == 2
    assert "pip install 'proteus-lm[plot]'" in capsys.readouterr().err
    assert not (work / "undrawn").exists()


def test_the_same_run_twice_in_a_report_is_refused(work, capsys):
    assert main(["report", f"{work}/e1", f"{work}/../{work.name}/e1", "--out", f"{work}/twice"]) == 2
    assert "is given twice" in capsys.readouterr().err
    assert not (work / "twice").exists()


def test_every_command_of_the_module_is_documented_in_the_help_of_each_option():
    spec = importlib.util.find_spec("proteus_lm.cli")
    assert spec is not None
    for function in (cli.prepare, cli.train, cli.evaluate, cli.generate, cli.report):
        text = function.__doc__ or ""
        for name in function.__annotations__:
            if name != "return":
                assert f"        {name}: " in text, f"{function.__name__} does not explain {name}"
