"""What suites share: scores that say why they are missing, results kept whole, choices checked, a hub asked only if it is there."""

import json
import math
import socket
import time

import pytest

from proteus_lm.evals import hub
from proteus_lm.evals.suite import SUITES, MissingData, Score, SuiteOptions, SuiteResult, require_hub

RESULT = SuiteResult(
    suite="table1",
    model="runs/a",
    command="proteus eval runs/a --suite table1",
    scores=(
        Score("piqa", "acc", 71.5, 1.05, 1838, 0, "1.0", "baber/piqa"),
        Score("wikitext", "word_perplexity", math.inf, math.nan, 62, 3, "2.0", "file", note="three"),
        Score.not_run("boolq", "acc", "no file"),
    ),
    extra={"versions": {"torch": "2"}, "rows": [1.5, -math.inf, None], "samples": {"piqa": (0, 1)}},
)


def test_a_result_comes_back_from_its_file_as_it_was(tmp_path):
    path = tmp_path / "new" / "table1.json"
    RESULT.save(path)
    back = SuiteResult.load(path)
    assert back.scores[0] == RESULT.scores[0]
    assert back.scores[1].value == math.inf and math.isnan(back.scores[1].stderr)
    assert back.scores[2] == RESULT.scores[2]
    assert (back.suite, back.model, back.command) == (RESULT.suite, RESULT.model, RESULT.command)
    assert back.extra == {"versions": {"torch": "2"}, "rows": [1.5, "-inf", None], "samples": {"piqa": [0, 1]}}


def test_the_file_is_strict_json(tmp_path):
    RESULT.save(tmp_path / "a.json")
    json.loads((tmp_path / "a.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_failed_save_leaves_the_older_file(tmp_path):
    path = tmp_path / "a.json"
    RESULT.save(path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        SuiteResult("s", "m", "c", (), {"not": object()}).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"suite": "a"}',
        '{"suite": "a", "model": "", "command": "", "scores": [{}], "extra": {}}',
        '{"suite": "a", "model": "", "command": "", "scores": [{"value": "x", "stderr": null}], "extra": {}}',
        '{"suite": "a", "model": "", "command": "", "scores": [], "extra": null}',
        '{"suite": "a", "model": "", "command": "", "scores": [], "extra": {"provenance": []}}',
    ],
)
def test_a_file_that_is_no_result_is_an_error(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=r"a\.json(:.*is not the result of a suite| is not JSON)"):
        SuiteResult.load(tmp_path / "a.json")


def test_a_folder_that_cannot_be_made_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="cannot be a folder: a file stands at its place"):
        RESULT.save(tmp_path / "file" / "a.json")


def test_a_score_is_found_by_task_and_metric():
    assert RESULT.score("piqa", "acc").count == 1838
    with pytest.raises(KeyError, match=r"no f1 of piqa in table1; it has piqa acc, wikitext word_perplexity, boolq acc"):
        RESULT.score("piqa", "f1")


def scored(*counts, task="a"):
    """One score for each length, of so many samples; None is one that was not run."""
    scores = [
        Score.not_run(task, str(i), f"no {i}") if n is None else Score(task, str(i), 50.0, None, n, 0, "1", "d")
        for i, n in enumerate(counts)
    ]
    return SuiteResult("table2", "m", "c", tuple(scores))


def test_what_a_result_would_lose_by_another_is_what_the_other_lacks_or_has_of_fewer_samples():
    assert scored(5, 5).more_than(scored(5, 5)) == ()
    assert scored(5, None).more_than(scored(6, 1, 1)) == ()
    assert scored(5, 1200).more_than(scored(5, 2)) == ("a 1: 1,200 samples, not 2",)
    assert scored(5, 5).more_than(scored(None, 5)) == ("a 0: 5 samples, not 0",)
    assert scored(5).more_than(scored(5, task="b")) == ("a 0: 5 samples, not 0",)


def test_perplexity_by_position_is_compared_by_its_whole_as_its_stretches_follow_the_length():
    short, long = (
        SuiteResult("fig4", "m", "c", (*scored(count, task="all").scores, *scored(count, task=stretch).scores))
        for count, stretch in ((300, "256-299"), (900, "256-511"))
    )
    assert short.more_than(long) == ()
    assert long.more_than(short) == ("all 0: 900 samples, not 300",)


def test_where_no_score_has_a_value_each_reason_is_given_once():
    assert scored(None, 3).why_nothing_ran() is None
    assert scored(None, None).why_nothing_ran() == "a 0: no 0; a 1: no 1"
    assert scored(*[None] * 5).why_nothing_ran() == "a 0: no 0; a 1: no 1; a 2: no 2; and 2 more"
    both = SuiteResult("fig2", "m", "c", tuple(Score.not_run("swde", length, "no file") for length in ("512", "1024")))
    assert both.why_nothing_ran() == "swde 512, swde 1024: no file"


def test_a_score_that_was_not_run_has_no_value_and_a_reason():
    score = RESULT.scores[2]
    assert (score.value, score.stderr, score.count, score.truncated, score.note) == (None, None, 0, 0, "no file")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit": 0}, "limit is 0"),
        ({"samples": -1}, "samples is -1"),
        ({"lengths": (4096, 0)}, "length 0 is 0"),
        ({"data": "absent"}, "no folder absent; give the folder"),
    ],
)
def test_options_that_cannot_be_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        SuiteOptions(**options)


def test_tasks_are_chosen_in_the_suite_s_order():
    assert SuiteOptions().chosen(("a", "b")) == ("a", "b")
    assert SuiteOptions(tasks=("c", "a")).chosen(("a", "b", "c")) == ("a", "c")
    with pytest.raises(ValueError, match=r"no task d in this suite; it has a, b"):
        SuiteOptions(tasks=("d",)).chosen(("a", "b"))


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_has_a_home(name):
    """Each is a function of its module; found without running it."""
    import importlib

    from proteus_lm.evals.suite import _HOMES

    assert callable(getattr(importlib.import_module(f"proteus_lm.evals.{_HOMES[name]}"), name))


# The hub.


def test_without_the_hub_its_libraries_look_into_their_caches_only_and_are_as_before_afterwards():
    import huggingface_hub
    from datasets import config

    before = (config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE)
    with pytest.raises(KeyError), hub.without_hub():
        assert config.HF_HUB_OFFLINE is True and huggingface_hub.constants.HF_HUB_OFFLINE is True
        raise KeyError
    assert before == (config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE)


@pytest.fixture
def free(monkeypatch):
    for name in (*hub._OFFLINE, *hub._PROXIES, "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("name", hub._OFFLINE)
def test_the_environment_can_forbid_the_hub(name, free):
    free.setenv(name, "1")
    free.setattr(socket, "create_connection", lambda *a, **k: pytest.fail("the network was asked"))
    with pytest.raises(MissingData, match=f"the list is not here, and the hub was not asked: {name} is set. Give a file."):
        require_hub("the list", "Give a file.")


def test_a_variable_set_to_no_forbids_nothing(free):
    free.setenv("HF_HUB_OFFLINE", "0")
    free.setattr(socket, "create_connection", lambda *a, **k: socket.socket())
    require_hub("the list", "Give a file.")


def test_a_hub_without_a_route_is_known_at_once(free):
    free.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(MissingData, match=r"the hub \(127\.0\.0\.1\) cannot be reached: .*refused.* Give a file\."):
        require_hub("the list", "Give a file.")


def test_a_hub_that_answers_is_asked(free):
    with socket.create_server(("127.0.0.1", 0)) as server:
        free.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        require_hub("the list", "Give a file.")


def test_a_name_that_never_resolves_does_not_hang(free):
    """The look-up of a name has no timeout of its own."""

    def slow(*args, **kwargs):
        time.sleep(1)
        raise OSError("no such name")

    free.setattr(hub, "TIMEOUT", 0.05)
    free.setattr(socket, "create_connection", slow)
    with pytest.raises(MissingData, match=r"did not answer within 0\.05 s"):
        require_hub("the list", "Give a file.")


def test_behind_a_proxy_the_request_itself_must_tell(free):
    free.setenv("HTTPS_PROXY", "http://proxy:3128")
    free.setattr(socket, "create_connection", lambda *a, **k: pytest.fail("connected past the proxy"))
    require_hub("the list", "Give a file.")


def test_the_user_can_forbid_the_hub(free):
    with pytest.raises(MissingData, match="offline was asked for"):
        require_hub("the list", "Give a file.", offline=True)


@pytest.mark.slow
@pytest.mark.shared
def test_all_suites_run_on_a_small_model_from_local_files(shared, tmp_path, capsys):
    """The command of the manual, end to end: what cannot be run for want of data says so, and everything else has a score."""
    pytest.importorskip("lm_eval", reason="needs the extra `eval`")
    from proteus_lm import ProteusConfig, ProteusForCausalLM
    from proteus_lm.cli import main
    from proteus_lm.data.tokenizer import byte_tokenizer

    model = ProteusForCausalLM(ProteusConfig(mixer="comba", hidden_size=32, num_heads=2, num_hidden_layers=1, memory_blocks=4))
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save(tmp_path / "model")
    options = ["--limit", "2", "--samples", "2", "--lengths", "2K", "4K", "--offline", "--data", f"{shared}/data/eval"]
    assert main(["eval", f"{tmp_path}/model", "--suite", "all", *options]) == 0
    assert "not run: " in capsys.readouterr().out  # SWDE and the paper's LongBench sets, which are not among the files
    folder = tmp_path / "model" / "evals"
    assert sorted(path.stem for path in folder.iterdir()) == sorted(SUITES)
    for name in SUITES:
        result = SuiteResult.load(folder / f"{name}.json")
        assert all("--data DIR" in score.note for score in result.scores if score.value is None), name
        assert any(score.value is not None for score in result.scores), name
        assert not any(score.truncated for score in result.scores), name
        assert result.extra["provenance"]["unlock_positions"] == [0, 2048, 4096, 6144]
