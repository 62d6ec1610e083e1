import importlib.util
import io
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from proteus_lm import cli
from proteus_lm.cli import main

COMMANDS = ("prepare", "train", "eval", "generate", "report", "ablate", "inspect", "synthesize", "doctor")


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
    # Under an empty package of the same name, because importing the package itself imports them.
    code = (
        "import sys, types\n"
        "package = types.ModuleType('proteus_lm'); sys.modules['proteus_lm'] = package\n"
        f"package.__path__ = [{str(Path(cli.__file__).parents[1])!r}]\n"
        "from proteus_lm import cli\n"
        f"for command in {COMMANDS!r}: assert cli.main([command, '--help']) == 0\n"
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
        (["eval", "r", "--limit", "3", "--offline"], "--limit, --offline can be given with --suite only"),
        (["eval", "r", "--suite", "table1", "--bins", "4"], "--bins can be given without --suite only"),
        (["eval", "r", "--suite", "table2", "--lengths", ""], "no length is given"),
        (["report", "a", "--context", "²x"], "'²x' is not a length"),
        (["report", "no-such-run", "--only-suites"], "no folder no-such-run"),
        (["inspect", "r", "--pairs", "0"], "pairs is 0; it must be at least 1"),
        (["generate", "no-such-run", "--prompt", "a"], "no folder no-such-run"),
        (["generate", "no-such-run", "--prompt", ""], "gives no token; give at least one character"),
        (["generate", "no-such-run", "--prompt", "a", "--top-p", "2"], "top_p is 2.0; it must be"),
        (["generate", "no-such-run", "--prompt", "a", "--temperature", "1e-300"], "temperature is 1e-300; it must be 0"),
        (["generate", "no-such-run", "--prompt", "a", "--seed", f"{2**64}"], "seed is 18446744073709551616; it must be 0 to"),
        (["report", "no-such-run", "--seed", f"{2**64}"], "seed is 18446744073709551616"),
        (["inspect", "no-such-run", "--seed", "-1"], "seed is -1; it must be 0 to"),
        (["synthesize", "mqar", "--out", "d", "--seed", f"{2**64}"], "seed is 18446744073709551616"),
        (["report"], "no run to report"),
        (["report", "a", "--context", "512"], "'512' is not a length"),
        (["report", "a", "--paper", "no-such.yaml"], "no file no-such.yaml"),
        (["report", "--only-suites"], "no results to show"),
        (["report", "--results", "no-such.json"], "no-such.json"),
        (["eval", "r", "--suite", "fig3"], "proteus ablate RECIPE --over model.memory_blocks=1,8,16,32"),
        (["eval", "no-such-run", "--suite", "fig4", "--offline"], "no-such-run"),
        (["eval", "r", "--suite", "fig4", "--lengths", "4k", "many"], "length 'many' is not a number of tokens"),
        (["eval", "r", "--suite", "fig4", "--limit", "0"], "limit is 0"),
        (["eval", "r", "--suite", "table1", "--data", "no-such-folder"], "no folder no-such-folder"),
        (["ablate", "no-such.yaml", "--over", "model.memory_blocks=1,4"], "no recipe at no-such.yaml"),
        (["ablate", "r.yaml", "--over", "memory_blocks"], "--over 'memory_blocks' is not of the form"),
        (["ablate", "r.yaml", "--over", "train.lr=1", "--seeds", "1,x"], "--seeds '1,x' must be whole numbers"),
        (["inspect", "no-such-run"], "no folder no-such-run"),
        (["synthesize", "mqar", "--out", "d", "--pairs", "20"], "with 20 pairs"),
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


def test_a_device_that_holds_no_numbers_is_a_clear_error(work, capsys):
    assert main(["generate", f"{work}/e4", "--prompt", "a", "--device", "meta"]) == 2
    assert "device 'meta' cannot be used here" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "inspect", "report"])
def test_data_of_another_tokenizer_are_refused_before_any_work(work, capsys, monkeypatch, tmp_path, command):
    shutil.copytree(f"{work}/e4", tmp_path / "run")
    assert main(["synthesize", "mqar", "--out", f"{tmp_path}/other", "--rows", "40"]) == 0
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(f"{work}/data", f"{tmp_path}/other"))
    monkeypatch.setattr("proteus_lm.run.Run.load_model", lambda *a, **k: pytest.fail("it should not come to this"))
    capsys.readouterr()
    assert main([command, f"{tmp_path}/run", *(["--out", f"{tmp_path}/out"] if command != "eval" else [])]) == 2
    error = capsys.readouterr().err
    assert f"error: {tmp_path}/other was made with the tokenizer" in error and "(hash " in error and ", not with " in error
    assert not (tmp_path / "out").exists()


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
    pictures = {"loss-by-position.png", "training.png", "memory.png"}
    assert {p.name for p in out.iterdir()} == {"report.md", "report.html", "report.json"} | pictures
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
    commands = [getattr(cli, name) for name in cli.__all__ if name not in ("app", "main", "doctor")]
    assert len(commands) == len(COMMANDS) - 1
    for function in commands:
        text = function.__doc__ or ""
        for name in function.__annotations__:
            if name != "return":
                assert f"        {name}: " in text, f"{function.__name__} does not explain {name}"


def test_lengths_are_numbers_of_tokens_with_or_without_a_unit():
    from proteus_lm.cli.common import token_counts

    assert token_counts(["16K", "4k,512", "1M", "4096"]) == (512, 4096, 16384, 1 << 20)
    assert token_counts([]) is None


def test_a_suite_of_a_run_is_printed_and_saved_with_all_that_makes_it_again(work, capsys, tmp_path):
    run = shutil.copytree(work / "e4", tmp_path / "e4")
    arguments = ["eval", str(run), "--suite", "fig4", "--lengths", "256", "--batch-size", "2"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    saved = json.loads((run / "evals" / "fig4.json").read_text())
    whole = saved["scores"][0]
    assert f"| all | perplexity | {whole['value']:.2f} ± " in shown
    provenance = saved["extra"]["provenance"]
    assert {"python", "torch", "transformers"} <= provenance["versions"].keys()
    assert provenance["config"]["memory_blocks"] == 4
    assert provenance["options"]["seed"] == 0
    assert provenance["options"]["lengths"] == [256]
    assert saved["command"] == shlex.join(["proteus", *arguments])
    assert len(saved["extra"]["raw"]["sums"]) == 3  # a row a document
    assert [p.name for p in (run / "evals").iterdir()] == ["fig4.json"]  # no temporary file is left
    assert main(["report", str(run), "--out", f"{tmp_path}/report", "--max-tokens", "256", "--sample-tokens", "0"]) == 0
    assert {"report.md", "report.html", "paper.md", "paper.html"} <= {p.name for p in (tmp_path / "report").iterdir()}


STRETCH = ("--memory-policy", "stretch", "--memory-context")


def test_eval_opens_a_trained_memory_over_another_length(work, capsys, tmp_path):
    """The same numbers as `set_context` from Python, other than without; what was done is in the results."""
    from proteus_lm import ProteusForCausalLM
    from proteus_lm.evals import evaluate
    from proteus_lm.run import Run

    run = Run.open(work / "e4")
    model = ProteusForCausalLM.from_pretrained(run.checkpoint(), memory_policy="stretch").eval()
    model.set_context(256)
    wanted = evaluate(model, run.dataset("validation"), context=128, training_context=64).whole.mean
    found = []
    for extra in ((*STRETCH, "256"), ()):
        assert main(["eval", f"{work}/e4", "--context", "128", "--json", *extra]) == 0
        found.append(json.loads(capsys.readouterr().out)["results"]["128"]["loss"]["mean"])
    assert found[0] == pytest.approx(wanted, rel=1e-6)
    assert abs(found[1] - wanted) > 1e-5
    for extra, positions in (((), [0, 16, 32, 48]), ((*STRETCH, "1K"), [0, 256, 512, 768])):
        assert main(["eval", f"{work}/e4", "--suite", "fig4", "--lengths", "256", "--out", f"{tmp_path}/o", *extra]) == 0
        saved = json.loads((tmp_path / "o" / "fig4.json").read_text())["extra"]["provenance"]
        assert saved["unlock_positions"] == positions
        assert saved["config"]["memory_policy"] == ("stretch" if extra else "uniform")


def test_generate_opens_a_trained_memory_over_another_length(work, capsys, monkeypatch):
    from proteus_lm.model import ProteusForCausalLM

    seen, real = [], ProteusForCausalLM.generate
    monkeypatch.setattr(ProteusForCausalLM, "generate", lambda self, *a, **k: seen.append(self.schedule) or real(self, *a, **k))
    for extra in ((), (*STRETCH, "400")):
        assert main(["generate", f"{work}/e4", "--prompt", "It was", "--max-new-tokens", "2", "--temperature", "0", *extra]) == 0
    assert [schedule.unlock_position(3) for schedule in seen] == [48, 300]


@pytest.mark.parametrize(
    ("run", "arguments", "says"),
    [
        ("e4", ("--memory-policy", "stretch"), "changes nothing by itself; say over what length with --memory-context"),
        ("e4", ("--memory-context", "4K"), "opens the blocks elsewhere than in training; say so with --memory-policy stretch"),
        ("e4", (*STRETCH, "long"), "length 'long' is not a number of tokens"),
        ("e4", (*STRETCH, "1K,2K"), "--memory-context 1K,2K is 2 lengths; give one"),
        ("e1", (*STRETCH, "4K"), "memory_policy"),
    ],
)
def test_a_memory_that_cannot_be_stretched_says_why(work, capsys, run, arguments, says):
    for command in (["eval", f"{work}/{run}"], ["generate", f"{work}/{run}", "--prompt", "a"]):
        assert main([*command, *arguments]) == 2
        assert says in capsys.readouterr().err


def test_only_a_memory_that_opens_evenly_is_stretched():
    from types import SimpleNamespace

    from proteus_lm import ProteusConfig, ProteusForCausalLM
    from proteus_lm.cli.memory import spread

    shape = {"mixer": "comba", "hidden_size": 16, "num_heads": 1, "num_hidden_layers": 1, "memory_blocks": 2, "memory_context": 8}
    given = ProteusForCausalLM(ProteusConfig(**shape, memory_policy="custom", memory_unlocks=[0, 5]))
    with pytest.raises(ValueError, match=r"open at the positions \[0, 5\], which were given .*only evenly opened ones"):
        spread(given, "stretch", "16")
    own = ProteusForCausalLM(ProteusConfig(**shape, memory_policy="stretch"))
    spread(own, None, "16")  # its own policy needs no flag
    assert own.schedule.unlock_position(1) == 8
    with pytest.raises(ValueError, match="has no blocks of memory to open"):
        spread(SimpleNamespace(config=SimpleNamespace(model_type="llama")), "stretch", "16")


def test_a_suite_runs_on_a_model_of_hugging_face_too(work, capsys, tmp_path):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=512, **sizes)).save_pretrained(tmp_path / "llama")
    AutoTokenizer.from_pretrained(work / "data").save_pretrained(tmp_path / "llama")
    assert main(["eval", f"{tmp_path}/llama", "--suite", "fig4", "--data", f"{work}/data", "--lengths", "256", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scores"][0]["value"] == pytest.approx(257, rel=0.2)  # an untrained model knows nothing
    assert found["extra"]["provenance"]["config"]["model_type"] == "llama"
    assert (tmp_path / "llama" / "evals" / "fig4.json").is_file()


def test_all_suites_run_one_after_another_and_one_that_fails_stops_no_other(work, capsys, monkeypatch, tmp_path):
    from proteus_lm.evals import suite as suites
    from proteus_lm.evals.suite import Score, SuiteResult

    def works(name):
        return lambda model, options: SuiteResult(name, model.name, "", (Score(name, "acc", 50.0, 1.0, 4, 0, "1", "d"),))

    def fails(model, options):
        raise ValueError("the essays are too short")

    monkeypatch.setattr(suites, "SUITES", {"table1": works("table1"), "table2": fails, "fig4": works("fig4")})
    assert main(["eval", f"{work}/e1", "--suite", "all", "--out", f"{tmp_path}/out"]) == 2
    seen = capsys.readouterr()
    assert "not run: table2: the essays are too short" in seen.err
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["fig4.json", "table1.json"]


def test_tasks_are_of_one_suite_and_a_folder_that_cannot_be_is_known_before_the_work(work, capsys, monkeypatch, tmp_path):
    from proteus_lm.evals import suite as suites

    monkeypatch.setattr(suites, "SUITES", {"fig4": lambda model, options: pytest.fail("worked in vain")})
    (tmp_path / "file").write_text("")
    assert main(["eval", f"{work}/e1", "--suite", "all", "--tasks", "piqa", "--out", f"{tmp_path}/out"]) == 2
    assert "--tasks piqa chooses among the tasks of one suite; name it in place of all" in capsys.readouterr().err
    assert main(["eval", f"{work}/e1", "--suite", "fig4", "--out", f"{tmp_path}/file"]) == 2
    assert "cannot be a folder: a file stands at its place" in capsys.readouterr().err


def test_the_report_gathers_the_suites_of_its_runs(work, capsys, tmp_path):
    for name in ("e1", "e4"):
        assert main(["eval", f"{work}/{name}", "--suite", "fig4", "--lengths", "256", "--out", f"{tmp_path}/{name}/evals"]) == 0
    values = {"suite": "fig4", "task": "all", "metric": "perplexity", "model": "Titans + Proteus", "value": 15.5, "read_off": True}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"source": "Figure 4, read off", "values": [values]}))
    arguments = ["report", f"{tmp_path}/e1", f"{tmp_path}/e4", "--only-suites", "--paper", f"{tmp_path}/values.yaml"]
    assert main([*arguments, "--out", f"{tmp_path}/report"]) == 0
    assert "Page: " in capsys.readouterr().out
    text = (tmp_path / "report" / "paper.md").read_text()
    assert "15.5 (read off)" in text
    assert "paper's value not at hand" in text  # for the base model, whose value the file does not give
    assert "e4 minus e1" in text
    assert {"paper.md", "paper.html", "fig4.png", "fig4.json"} == {p.name for p in (tmp_path / "report").iterdir()}


def test_ablate_trains_and_tells_where_its_report_is(work, capsys, tmp_path):
    arguments = ["--over", "model.memory_blocks=1,4", "--seeds", "0", "--set", "train.steps=2", "--max-tokens", "256"]
    assert main(["ablate", f"{work}/e1.yaml", *arguments, "--out", f"{tmp_path}/out"]) == 0
    shown = capsys.readouterr().out
    assert "one seed: no verdict" in shown
    assert f"Report: {tmp_path}/out/ablation.md" in shown
    assert main(["report", "--results", f"{tmp_path}/out/fig3.json", "--out", f"{tmp_path}/report"]) == 0
    assert "## Figure 3" in (tmp_path / "report" / "paper.md").read_text()


def test_inspect_shows_blocks_and_retention_and_writes_what_it_shows(work, capsys):
    assert main(["inspect", f"{work}/e4", "--pairs", "4", "--looks", "4", "--windows", "2"]) == 0
    shown = capsys.readouterr().out
    out = work / "e4" / "inspect"
    pictures = {"blocks.png", "retention.png"}
    assert {p.name for p in out.iterdir()} == {"inspect.md", "inspect.html", "inspect.json"} | pictures
    raw = json.loads((out / "inspect.json").read_text())
    assert raw["profile"]["unlock_positions"] == [0, 16, 32, 48]
    for name in ("Norm", "Effective rank", "Write strength", "Read strength"):
        assert f"**{name}**" in shown
    last = raw["profile"]["norm_by_point_layer_block"][-1]
    mean = sum(layer[0] for layer in last) / len(last)
    assert f"| {mean:.4g} |" in shown
    assert "| locked |" in shown
    assert "gain (nats)" in shown
    assert raw["versions"]["torch"]
    assert len(raw["retention"]["written"]) == 4


def test_a_run_trained_on_a_synthetic_task_is_asked_it(work, capsys, tmp_path):
    sizes = ["--length", "16", "--pairs", "2", "--vocab", "8", "--rows", "40", "--episodes", "1"]
    assert main(["synthesize", "mqar", "--out", f"{tmp_path}/data", *sizes]) == 0
    assert "train with data.context=17 data.allow_short_documents=true" in capsys.readouterr().out
    changes = [f"data.path={tmp_path}/data", "data.context=17", "data.allow_short_documents=true", "train.steps=2"]
    assert main(["train", f"{work}/e1.yaml", "--out", f"{tmp_path}/run", "--set", *changes]) == 0
    capsys.readouterr()
    assert main(["inspect", f"{tmp_path}/run", "--pairs", "1", "--rows", "8", "--json"]) == 0
    raw = json.loads(capsys.readouterr().out)
    assert raw["task"]["task"]["task"] == "mqar"
    assert len(raw["task"]["answers"]["right"]) == 16
