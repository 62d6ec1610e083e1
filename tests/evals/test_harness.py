"""Table 1 gives the scores of lm-evaluation-harness's own Hugging Face model, sample by sample; stubs score 100, chance and 0."""

import gzip
import json
import math
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from proteus_lm import ProteusConfig, ProteusForCausalLM
from proteus_lm.data.tokenizer import byte_tokenizer
from proteus_lm.evals import hub
from proteus_lm.evals.harness import NAMES, TASKS, table1
from proteus_lm.evals.language_model import LanguageModel
from proteus_lm.evals.suite import SuiteOptions

pytest.importorskip("lm_eval", reason="needs the extra `eval`")
BY_NAME = {task.name: task for task in TASKS}


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save(folder)
    return folder


@pytest.fixture(scope="module")
def bytes_of(byte_folder):
    return AutoTokenizer.from_pretrained(byte_folder)


@pytest.fixture(scope="module")
def files(shared):
    return shared / "data" / "eval"


# Against the harness's own model on the same files.

LIMIT = 5
"""Samples a task."""
TOKENS = 512
"""Position limit of the Llama and the GPT-NeoX below: passages of BoolQ are longer in bytes, and the pages of Wikitext."""


def random_model(kind: str):
    torch.manual_seed(0)
    common = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"bos_token_id": None, "eos_token_id": 0}
    if kind == "llama":
        made = LlamaForCausalLM(LlamaConfig(vocab_size=32000, max_position_embeddings=2048, **common, **tokens))
    elif kind == "neox":
        made = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=257, max_position_embeddings=TOKENS, **common, **tokens))
    else:
        made = ProteusForCausalLM(ProteusConfig(mixer="comba", hidden_size=32, num_heads=2, memory_blocks=4, memory_context=64))
    with torch.no_grad():
        made.get_output_embeddings().weight.mul_(20)  # far from uniform, so that samples differ
    return made.eval()


def trained_model(mixer: str, files: Path):
    """A small model of ours, with its convolution and four blocks of memory, after 40 steps on bytes of essays."""
    torch.manual_seed(0)
    config = ProteusConfig(mixer=mixer, hidden_size=64, num_heads=2, memory_blocks=4, memory_context=64, conv_size=4)
    made = ProteusForCausalLM(config)
    with gzip.open(files / "public_domain_essays.jsonl.gz", "rt", encoding="utf-8") as file:
        text = torch.tensor(list(json.loads(file.readline())["text"].encode()[:40_960])).view(40, 8, 128)
    optimizer, losses = torch.optim.AdamW(made.parameters(), lr=5e-3), []
    for rows in text:
        loss = made(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # All bytes alike give ln 257 = 5.5; letters by their frequency, the least that can be learnt, some 3.1.
    assert losses[0] > 5.4
    assert sum(losses[-5:]) / 5 < 3.2, f"{mixer} has learnt nothing: {losses}"
    return made.eval()


TRAINED = {"trained comba": "comba", "trained titans": "titans"}
OURS = ("ours", *TRAINED)


@pytest.fixture(
    scope="module", params=["llama", "neox", "ours", "trained comba", pytest.param("trained titans", marks=pytest.mark.slow)]
)
def both(request, files, bytes_of, shared, tmp_path_factory):
    """For one model: our results, and the harness's with its own Hugging Face model and its own reader of JSON files."""
    pytest.importorskip("accelerate", reason="the harness's own Hugging Face model needs accelerate")
    import lm_eval.tasks
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tokenizer = bytes_of
    if request.param == "llama":
        file = shared / "data" / "tokenizer" / "tokenizer.json"
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<|endoftext|>", pad_token="<|pad|>")
    # Wikitext's pages are long: their first paragraphs do.
    folder = tmp_path_factory.mktemp("data")
    for task in TASKS:
        rows = task.rows(task.find(files))[:LIMIT]
        rows = [{**row, "page": row["page"][:3000]} if "page" in row else row for row in rows]
        (folder / f"{task.file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    net = trained_model(TRAINED[request.param], files) if request.param in TRAINED else random_model(request.param)
    lm = LanguageModel(net, tokenizer, batch_size=3, chunk=100, name=request.param)
    ours = table1(lm, SuiteOptions(data=folder, allow_truncation=True))

    other = HFLM(pretrained=net, tokenizer=tokenizer, batch_size=2, max_length=10**6 if request.param in OURS else None)
    members, folders = [], [str(Path(lm_eval.tasks.__file__).parent / task.folder) for task in TASKS]
    for task in TASKS:
        splits = {f"{name}_split": task.split if name == task.split else None for name in ("training", "validation", "test")}
        source = {
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {task.split: str(task.find(folder))}},
        }
        members.append({"task": task.name, "num_fewshot": 0, **splits, **source})
    loaded = TaskManager(include_path=folders, include_defaults=False).load([{"group": "local", "task": members}])
    theirs = evaluate(other, task_dict=loaded, bootstrap_iters=0, log_samples=True)
    return request.param, ours, theirs


@pytest.mark.shared
@pytest.mark.parametrize("name", NAMES)
def test_scores_equal_the_harness_own_model(both, name):
    from lm_eval.api.metrics import mean_stderr

    _, ours, theirs = both
    for metric in BY_NAME[name].metrics:
        score = ours.score(name, metric)
        wanted = theirs["results"][name][f"{metric},none"]
        percent = 100 if metric.startswith("acc") else 1
        # Sums of fp32 log probabilities, in nats up to some thousands; exp of their means.
        assert score.value == pytest.approx(percent * wanted, rel=2e-4)
        assert score.count == theirs["n-samples"][name]["effective"] == LIMIT
        assert score.version == str(theirs["versions"][name])
        if metric.startswith("acc"):
            assert score.stderr == pytest.approx(100 * mean_stderr([sample[metric] for sample in theirs["samples"][name]]))


@pytest.mark.shared
@pytest.mark.parametrize("name", NAMES)
def test_samples_equal_the_harness_own_model_one_by_one(both, name):
    """A score of five samples says little: what it is made of must agree."""
    _, ours, theirs = both
    for metric in BY_NAME[name].metrics:
        rows = ours.extra["samples"][name][metric]
        wanted = [sample[metric] for sample in theirs["samples"][name]]
        if metric.startswith("acc"):
            assert rows == wanted
        else:
            assert torch.allclose(torch.tensor(rows, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64), rtol=1e-4)


@pytest.mark.shared
def test_what_the_harness_cuts_in_silence_is_counted(both):
    kind, ours, theirs = both
    cut = {score.task for score in ours.scores if score.truncated}
    longest = max(len(s["arguments"][0][0].encode()) for s in theirs["samples"]["boolq"])
    assert longest > TOKENS
    assert cut == ({"boolq"} if kind == "neox" else set())
    windows = [score.note for score in ours.scores if "read in windows" in score.note]
    assert len(windows) == (3 if kind == "neox" else 0)


@pytest.mark.shared
def test_a_sample_too_long_is_refused_unless_cutting_is_allowed(files, bytes_of):
    lm = LanguageModel(random_model("neox"), bytes_of, name="short")
    result = table1(lm, SuiteOptions(data=files, limit=LIMIT, tasks=("boolq", "winogrande")))
    boolq, winogrande = result.score("boolq", "acc"), result.score("winogrande", "acc")
    assert boolq.value is None
    assert "short has room for 513" in boolq.note
    assert "allow truncation" in boolq.note
    assert winogrande.value is not None
    assert winogrande.truncated == 0


# Stubs on samples made by hand.


def made_rows(count: int = 8) -> dict[str, list[dict]]:
    """Samples whose right answer says so: it holds RIGHT, or its context ANSWER. Every place is right equally often."""
    rows: dict[str, list[dict]] = {name: [] for name in NAMES}
    for i in range(count):
        two, three, four = i % 2, i % 3, i % 4
        choice = [["WRONG", "RIGHT"][n == four] + f" {n}" for n in range(4)]
        rows["wikitext"].append({"page": f" = Page {i} = \n \n Some words , and more . \n"})
        rows["lambada_openai"].append({"text": f"The word number {i} is RIGHT"})
        rows["piqa"].append({"goal": f"goal {i}", **{f"sol{n + 1}": ["WRONG", "RIGHT"][n == two] for n in range(2)}, "label": two})
        rows["hellaswag"].append(
            {"activity_label": "Act", "ctx_a": f"One {i}.", "ctx_b": "he", "endings": choice, "label": str(four)}
        )
        options = {f"option{n + 1}": ["WRONG", "RIGHT"][n == two] for n in range(2)}
        rows["winogrande"].append({"sentence": f"Row {i}: it was _ because.", **options, "answer": str(two + 1)})
        for name in ("arc_easy", "arc_challenge"):
            choices = {"text": choice, "label": list("ABCD")}
            rows[name].append({"id": str(i), "question": f"q {i}", "choices": choices, "answerKey": "ABCD"[four]})
        answers = {f"answer{letter}": ["WRONG", "RIGHT"][n == three] for n, letter in enumerate("ABC")}
        rows["social_iqa"].append({"context": f"c {i}", "question": "q?", **answers, "label": str(three + 1)})
        rows["boolq"].append({"passage": f"p {i} ANSWER={['no', 'yes'][two]}.", "question": "is it", "label": two})
    return rows


def write(folder: Path, rows: dict[str, list[dict]]) -> Path:
    for name, samples in rows.items():
        with gzip.open(folder / f"{BY_NAME[name].file}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in samples)
    return folder


class Stub(LanguageModel):
    """Knows every answer, or none."""

    def __init__(self, tokenizer, perfect: bool) -> None:
        super().__init__(random_model("neox"), tokenizer, name="stub")
        self.perfect, self.seen = perfect, []

    def loglikelihoods(self, pairs):
        found = []
        for context, continuation in pairs:
            before, after = self.tokenizer.decode(context), self.tokenizer.decode(continuation)
            self.seen.append((before, after))
            # Winogrande's answer stands in the context, before the same continuation.
            right = "RIGHT" in after or f"ANSWER={after.strip()}." in before or ("RIGHT" in before and "because" in after)
            # The blind one likes all answers alike by their length, so that acc_norm has nothing to go by either.
            found.append((0.0, True) if self.perfect and right else (-1.0 * len(after), False))
        return found

    def rolling(self, documents, *, prefix):
        return [0.0 if self.perfect else -len(d) * math.log(256) for d in documents]


def test_a_perfect_stub_scores_100(tmp_path, bytes_of):
    result = table1(Stub(bytes_of, True), SuiteOptions(data=write(tmp_path, made_rows(12))))
    for score in result.scores:
        perfect = {"bits_per_byte": 0}.get(score.metric, 100 if score.metric.startswith("acc") else 1)
        assert (score.value, score.stderr, score.count) == (perfect, 0, 12), score


def test_a_blind_stub_scores_chance_or_nothing(tmp_path, bytes_of):
    """RIGHT and WRONG are equally long, and so is no choice better; yes is longer than no, and right half the time."""
    result = table1(Stub(bytes_of, False), SuiteOptions(data=write(tmp_path, made_rows(12))))
    chance = {
        "piqa": 50,
        "hellaswag": 25,
        "winogrande": 50,
        "arc_easy": 25,
        "arc_challenge": 25,
        "social_iqa": 100 / 3,
        "boolq": 50,
    }
    for name, percent in chance.items():
        (score,) = (s for s in result.scores if s.task == name)
        assert score.value == pytest.approx(percent), name
        assert 0 < score.stderr < 20
    assert result.score("lambada_openai", "acc").value == 0
    assert result.score("wikitext", "byte_perplexity").value < 256  # the detokenised text has fewer bytes than those counted


def test_the_paper_s_metrics_come_in_the_paper_s_order(tmp_path, bytes_of):
    result = table1(Stub(bytes_of, True), SuiteOptions(data=write(tmp_path, made_rows())))
    found = [(score.task, score.metric) for score in result.scores]
    paper = [
        ("wikitext", "word_perplexity"),
        *(("lambada_openai", metric) for metric in ("perplexity", "acc")),
        *(("piqa", "acc"), ("hellaswag", "acc_norm"), ("winogrande", "acc"), ("arc_easy", "acc")),
        *(("arc_challenge", "acc_norm"), ("social_iqa", "acc"), ("boolq", "acc")),
    ]
    assert [pair for pair in found if pair in paper] == paper
    assert set(found) - set(paper) == {("wikitext", "byte_perplexity"), ("wikitext", "bits_per_byte")}


def test_the_limit_takes_the_first_samples_and_the_error_is_that_of_their_mean(tmp_path, bytes_of):
    stub = Stub(bytes_of, True)
    rows = made_rows(10)
    rows["piqa"][0]["label"] = 1  # the stub will be wrong there
    result = table1(stub, SuiteOptions(data=write(tmp_path, rows), limit=4, tasks=("piqa",)))
    (score,) = result.scores
    assert (score.value, score.count, score.truncated) == (75, 4, 0)
    assert score.stderr == pytest.approx(100 * math.sqrt(0.75 * 0.25 / 3))
    assert result.extra["samples"] == {"piqa": {"acc": [0, 1, 1, 1]}}
    assert len(stub.seen) == 8


def test_no_text_is_encoded_and_no_template_compiled_twice(tmp_path, bytes_of, monkeypatch):
    """One by one and anew for each choice took the harness more time than a small model takes on a GPU."""
    import jinja2
    from lm_eval import utils

    compiled, real = [], jinja2.Environment.from_string
    monkeypatch.setattr(jinja2.Environment, "from_string", lambda env, text, *rest: compiled.append(text) or real(env, text, *rest))
    monkeypatch.setattr(bytes_of, "encode", lambda text, **options: pytest.fail(f"{text!r} is encoded alone"))
    stub = Stub(bytes_of, True)
    result = table1(stub, SuiteOptions(data=write(tmp_path, made_rows(12)), tasks=("piqa", "arc_easy", "boolq", "social_iqa")))
    assert {score.value for score in result.scores} == {100}
    assert len(compiled) < 12 + 4 * 6  # once for each of a task's few templates, and as often as the harness looks before the run
    assert "from_string" not in vars(utils.env), "the harness is left as it was"


def test_texts_encoded_together_are_those_of_the_harness_one_by_one(bytes_of):
    """Spaces at the end of a context go to the continuation; a text that begins with the prefix token is not given it twice."""
    from lm_eval.api.instance import Instance

    from proteus_lm.evals.harness.adapter import HarnessModel

    class Records(Stub):
        def loglikelihoods(self, pairs):
            self.seen = pairs
            return [(0.0, True)] * len(pairs)

    prefix = bytes_of.eos_token
    pairs = [
        ("a question ", "an answer"),
        ("", "alone"),
        (prefix + "begun", " rest"),
        ("two  \n", " x"),
        ("same", " y"),
        ("same", " z"),
    ]
    stub = Records(bytes_of, True)
    HarnessModel(stub).loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    ids = lambda text: list(bytes_of.encode(text))  # noqa: E731
    wanted = [(ids("a question"), ids(" an answer")), ([bytes_of.eos_token_id], ids("alone"))]
    wanted += [(ids(prefix + "begun"), ids(" rest"))]
    wanted += [(ids("two"), ids("  \n x")), (ids("same"), ids(" y")), (ids("same"), ids(" z"))]
    assert stub.seen == wanted


def test_nothing_is_printed(tmp_path, bytes_of, capfd):
    table1(Stub(bytes_of, True), SuiteOptions(data=write(tmp_path, made_rows())))
    assert capfd.readouterr() == ("", "")


def test_versions_settings_and_command_are_kept(tmp_path, bytes_of):
    from importlib import metadata

    options = SuiteOptions(data=write(tmp_path, made_rows()), tasks=("piqa",), command="proteus eval x --suite table1")
    result = table1(Stub(bytes_of, True), options)
    assert result.command == "proteus eval x --suite table1"
    assert result.extra["versions"]["lm_eval"] == metadata.version("lm_eval")
    assert {"limit", "seed", "num_fewshot"} <= set(result.extra)
    assert result.scores[0].version == "1.0"
    assert result.scores[0].data.endswith("piqa_validation.jsonl.gz")


# Files of another layout, and the hub's.


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (
            "arc_easy",
            lambda row: {
                "id": row["id"],
                "question": {
                    "stem": row["question"],
                    "choices": [{"text": t, "label": x} for t, x in zip(row["choices"]["text"], row["choices"]["label"])],
                },
                "answerKey": row["answerKey"],
            },
        ),
        ("boolq", lambda row: {**{k: v for k, v in row.items() if k != "label"}, "answer": bool(row["label"])}),
        ("social_iqa", lambda row: {**{k: v for k, v in row.items() if k != "label"}, "correct": "ABC"[int(row["label"]) - 1]}),
        ("hellaswag", lambda row: {**row, "label": int(row["label"])}),
        ("piqa", lambda row: {**row, "label": str(row["label"])}),
    ],
)
def test_the_authors_own_layouts_give_the_same_samples(tmp_path, name, change):
    rows = made_rows()[name]
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(change(row)) + "\n" for row in rows))
    task = BY_NAME[name]
    assert task.rows(task.find(tmp_path)) == rows


def test_a_line_that_is_no_sample_is_named(tmp_path, bytes_of):
    good = json.dumps(made_rows()["piqa"][0])
    for bad, words in (
        ("{", "line 2 of .* is no sample of piqa"),
        ('{"goal": "g"}', "line 2 of .*must be a JSON object with goal"),
    ):
        (tmp_path / "piqa.jsonl").write_text(good + "\n" + bad + "\n")
        with pytest.raises(ValueError, match=words):
            table1(Stub(bytes_of, True), SuiteOptions(data=tmp_path, tasks=("piqa",)))
    (tmp_path / "piqa.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no sample of piqa"):
        table1(Stub(bytes_of, True), SuiteOptions(data=tmp_path, tasks=("piqa",)))


def test_a_damaged_file_of_the_last_task_is_known_before_the_first_is_scored(tmp_path, bytes_of, monkeypatch):
    (tmp_path / "piqa.jsonl").write_text(json.dumps(made_rows()["piqa"][0]))
    (tmp_path / "boolq.jsonl.gz").write_bytes(gzip.compress(b"{}")[:-9])
    stub = Stub(bytes_of, True)
    monkeypatch.setattr(stub, "loglikelihoods", lambda pairs: pytest.fail("scored in vain"))
    with pytest.raises(ValueError, match=r"boolq\.jsonl\.gz cannot be read"):
        table1(stub, SuiteOptions(data=tmp_path, tasks=("piqa", "boolq")))


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("piqa", {"goal": "a", "sol1": "b", "sol2": "c", "label": 7}),
        ("piqa", {"goal": "", "sol1": "", "sol2": "", "label": 0}),
        ("wikitext", {"page": ""}),
    ],
)
def test_samples_that_the_harness_cannot_use_name_their_file(tmp_path, bytes_of, name, row):
    (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=rf"cannot use the samples of .*{name}\.jsonl for {name}"):
        table1(Stub(bytes_of, True), SuiteOptions(data=tmp_path, tasks=(name,)))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_rows_score_the_same_from_the_hub_and_from_files(name, tmp_path, bytes_of, monkeypatch):
    """The hub is played by a data set of its splits, some of them without answers as there."""
    import datasets

    rows = made_rows()[name]
    asked = []

    def load_dataset(path, name=None, **options):
        asked.append(path)
        return datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split in ("train", "validation", "test")})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "_unreachable", lambda: "")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    net = LanguageModel(random_model("neox"), bytes_of)
    remote = table1(net, SuiteOptions(tasks=(name,)))
    local = table1(net, SuiteOptions(tasks=(name,), data=write(tmp_path, {name: rows})))
    assert len(asked) == 1
    assert [(s.metric, s.value, s.stderr, s.count) for s in remote.scores] == [
        (s.metric, s.value, s.stderr, s.count) for s in local.scores
    ]
    assert remote.scores[0].data.split()[0] == asked[0]


# Without network, data or library.


def no_route(*args, **kwargs):
    raise OSError("Network is unreachable")


@pytest.mark.parametrize("how", ["environment", "asked", "no route"])
def test_without_the_hub_every_task_says_at_once_what_is_missing(how, bytes_of, monkeypatch, tmp_path):
    """Nothing may be asked of the network: a connection is an error here."""
    import datasets

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "empty")
    if how == "environment":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket, "create_connection", no_route)
    monkeypatch.setattr(socket.socket, "connect", no_route)
    result = table1(Stub(bytes_of, True), SuiteOptions(offline=how == "asked"))
    reason = {"environment": "HF_HUB_OFFLINE is set", "asked": "offline was asked for", "no route": "Network is unreachable"}[how]
    assert {score.task for score in result.scores} == set(NAMES)
    for score in result.scores:
        assert score.value is None and score.count == 0
        assert reason in score.note
        assert f"{BY_NAME[score.task].file}.jsonl.gz with --data" in score.note


def test_what_lies_in_the_cache_of_the_hub_is_taken_without_it(bytes_of, monkeypatch):
    """The hub's libraries are told that they are offline, whatever they read in the environment when they were imported."""
    import datasets

    def load_dataset(path, name=None, **options):
        assert datasets.config.HF_HUB_OFFLINE
        return datasets.DatasetDict({split: datasets.Dataset.from_list(made_rows()["piqa"]) for split in ("train", "validation")})

    before = datasets.config.HF_HUB_OFFLINE
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (score,) = table1(Stub(bytes_of, True), SuiteOptions(tasks=("piqa",), offline=True)).scores
    assert (score.value, score.data) == (100, "baber/piqa (cached)")
    assert before == datasets.config.HF_HUB_OFFLINE


def test_a_folder_without_one_task_s_file_leaves_that_task_out_alone(tmp_path, bytes_of, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write(tmp_path, {name: rows for name, rows in made_rows().items() if name != "piqa"})
    result = table1(Stub(bytes_of, True), SuiteOptions(data=tmp_path))
    missing = {score.task for score in result.scores if score.value is None}
    assert missing == {"piqa"}
    assert f"{tmp_path} holds neither piqa_validation.jsonl.gz" in result.score("piqa", "acc").note


def test_a_hub_that_fails_midway_leaves_that_task_out(bytes_of, monkeypatch):
    import datasets

    monkeypatch.setattr(hub, "_unreachable", lambda: "")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(datasets, "load_dataset", no_route)
    (score,) = table1(Stub(bytes_of, True), SuiteOptions(tasks=("piqa",))).scores
    assert score.value is None
    assert "did not come from the hub (OSError: Network is unreachable). Give a folder" in score.note


def test_lm_eval_is_imported_only_when_the_suite_runs_and_its_absence_says_what_to_install(tmp_path):
    """In a fresh interpreter, where lm-eval cannot be found; the suite's modules import all the same."""
    code = f"""
import sys
import proteus_lm.evals.harness
from proteus_lm.evals.suite import SUITES, SuiteOptions
assert not [name for name in sys.modules if name.startswith("lm_eval")]
sys.modules["lm_eval"] = None
try:
    SUITES["table1"](None, SuiteOptions(data={str(tmp_path)!r}))
except ImportError as error:
    assert "pip install proteus-lm[eval]" in str(error), error
    print("said so")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "said so", done.stderr


def test_a_task_that_is_not_there_is_named(bytes_of):
    with pytest.raises(ValueError, match=r"no task mmlu in this suite; it has wikitext, lambada_openai"):
        table1(Stub(bytes_of, True), SuiteOptions(tasks=("mmlu",)))


# The adapter alone.


def test_generation_is_greedy_until_the_harness_stop_strings(bytes_of, monkeypatch):
    from lm_eval.api.instance import Instance

    from proteus_lm.evals.harness.adapter import HarnessModel

    class Echo(LanguageModel):
        def generate(self, prompts, *, max_new_tokens, stop=()):
            return [f"{self.tokenizer.decode(p)}|{max_new_tokens}|{','.join(stop)}" for p in prompts]

    lm = HarnessModel(Echo(random_model("neox"), bytes_of))

    def request(text, **options):
        return Instance(request_type="generate_until", doc={}, arguments=(text, options), idx=0)

    asked = [
        request("a", until=["\n", ""], max_gen_toks=5),
        request("bb"),
        request("c", until="x", do_sample=False, temperature=0.0),
        request("d", until=["\n", ""], max_gen_toks=5),
    ]
    assert lm.generate_until(asked) == ["a|5|\n", "bb|256|", "c|256|x", "d|5|\n"]
    with pytest.raises(ValueError, match="only greedy"):
        lm.generate_until([request("a", do_sample=True, temperature=0.7)])


def test_an_empty_context_becomes_the_prefix_token(bytes_of):
    from lm_eval.api.instance import Instance

    from proteus_lm.evals.harness.adapter import HarnessModel

    net = random_model("neox")
    request = Instance(request_type="loglikelihood", doc={}, arguments=("", "text"), idx=0)
    lm = LanguageModel(net, bytes_of)
    assert HarnessModel(lm).loglikelihood([request]) == lm.loglikelihoods([([256], list(b"text"))])
