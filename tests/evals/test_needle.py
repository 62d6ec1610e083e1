"""The needle tasks are RULER's: what is hidden, how it is asked, how long it is, how it is scored; the same in every process."""

import hashlib
import json
import re
from collections import Counter

import pytest
import torch

from proteus_lm import ProteusConfig, ProteusForCausalLM
from proteus_lm.evals.language_model import LanguageModel
from proteus_lm.evals.long_context import Haystack, Store, count_tokens, tokenizer_hash
from proteus_lm.evals.needle import TASKS, TOKENS_TO_GENERATE, Kitchen, NeedleTask, load_words, samples, string_match_all, table2
from proteus_lm.evals.needle.tasks import DEPTHS, NOISE
from proteus_lm.evals.needle.words import WordLists
from proteus_lm.evals.suite import SUITES, SuiteOptions

from .recallers import ESSAY, Says, byte_level, essays, pieces

HAYSTACK = Haystack(ESSAY, "test")
WORDS = load_words(None)


def kitchen(task: str | NeedleTask, seed: int = 0) -> Kitchen:
    return Kitchen(TASKS[task] if isinstance(task, str) else task, WORDS, HAYSTACK, seed)


def made(task: str | NeedleTask, length: int = 3000, count: int = 6, seed: int = 0, tokenizer=None):
    """The questions of a task."""
    tokenizer = tokenizer or byte_level()
    kit = kitchen(task, seed)
    return [kit.question(r) for r in kit.recipes(count, length, lambda texts: count_tokens(tokenizer, texts), "hash")]


def recall(prompt: str) -> str:
    """What a reader with a perfect memory writes: every value of every key that is asked for."""
    (query,) = re.findall(r"\? The special magic \w+ for (.*) mentioned in the provided text (?:is|are)$", prompt)
    keys = re.split(r", and |, ", query)
    hidden = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", prompt)
    return " " + ", ".join(value for key in keys for name, value in hidden if name == key) + "."


# What is hidden and asked.


def test_a_single_number_is_asked_in_rulers_words():
    question = made("niah_single_1")[0]
    (value,) = question.expected
    (key,) = re.findall(rf"One of the special magic numbers for (\S+) is: {value}\.", question.prompt)
    lines = question.prompt.split("\n")
    assert lines[0] == (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the number "
        "afterwards."
    )
    assert lines[-1] == (
        f"What is the special magic number for {key} mentioned in the provided text? The special magic number for {key} mentioned "
        "in the provided text is"
    )
    assert Counter(lines[1:-1]) == {NOISE: len(lines) - 3, f"One of the special magic numbers for {key} is: {value}.": 1}


def test_several_numbers_are_asked_in_rulers_words():
    question = made("niah_multiquery")[0]
    found = dict(re.findall(r"One of the special magic numbers for (\S+) is: (\d{7})\.", question.prompt))
    assert sorted(found.values()) == sorted(question.expected) and len(found) == 4
    names = [next(key for key, value in found.items() if value == expected) for expected in question.expected]
    query = f"{names[0]}, {names[1]}, {names[2]}, and {names[3]}"
    assert question.prompt.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about the "
        "numbers afterwards.\n"
    )
    assert question.prompt.endswith(
        f"\nWhat are all the special magic numbers for {query} mentioned in the provided text? The special magic numbers for "
        f"{query} mentioned in the provided text are"
    )


@pytest.mark.parametrize(
    ("task", "needles", "keys", "expected", "value"),
    [
        ("niah_single_1", 1, 1, 1, r"\d{7}"),
        ("niah_single_2", 1, 1, 1, r"\d{7}"),
        ("niah_single_3", 1, 1, 1, r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"),
        ("niah_multikey_1", 4, 4, 1, r"\d{7}"),
        ("niah_multiquery", 4, 4, 4, r"\d{7}"),
        ("niah_multivalue", 4, 1, 4, r"\d{7}"),
    ],
)
def test_each_task_hides_what_ruler_says(task, needles, keys, expected, value):
    for question in made(task):
        found = re.findall(r"One of the special magic \w+ for ([a-z]+-[a-z]+) is: (\S+)\.", question.prompt)
        assert len(found) == needles and len({key for key, _ in found}) == keys
        assert all(re.fullmatch(value, v) for _, v in found)
        assert len(question.expected) == expected == len(question.about["depths"])


def test_line_retrieval_has_lines_of_other_keys_only():
    for question in made("niah_multikey_2"):
        lines = question.prompt.split("\n")[1:-1]
        found = [re.fullmatch(r"One of the special magic numbers for (\S+) is: (\d{7})\.", line) for line in lines]
        assert len(found) > 20 and all(found)
        key = re.findall(r"for (\S+) mentioned", question.prompt)[0]
        assert [m[2] for m in found if m and m[1] == key] == list(question.expected)


def test_essay_needles_stand_between_sentences_at_rulers_depths():
    for question in made("niah_multikey_1", length=6000):
        context = question.prompt.split("\n")[1]
        outside = re.split(r" ?One of the special magic numbers for \S+ is: \d+\. ?", context)
        assert " ".join(part for part in outside if part) == HAYSTACK.text(0, len(" ".join(outside).split()))
        assert all(not part or part[-1] in ".?" for part in outside[:-1])
        before = context[: context.index(question.expected[0])]
        share = (len(before.split()) - 8) / (len(context.split()) - 4 * 9)
        assert abs(100 * share - question.about["depths"][0]) < 12  # the other needles in front of it count above, not in depths
    assert DEPTHS[0] == 0 and DEPTHS[-1] == 100 and len(DEPTHS) == 40


def test_too_few_words_for_a_task_s_keys_are_an_error_and_do_not_hang():
    words = WordLists(("red",), ("house", "barn", "mill", "pond"), "mine")
    task = NeedleTask("four keys", haystack="needle", keys=4, values=1, queries=1, key_kind="words")
    with pytest.raises(ValueError, match="mine gives 4 names of adjective and noun, and 5 are needed"):
        Kitchen(task, words, None, seed=0).recipes(1, 2000, lambda texts: [len(text) for text in texts], "characters")


def test_depth_can_be_set():
    for haystack in ("noise", "essay", "needle"):
        for depth, near in ((0, 0.0), (50, 50.0), (100, 100.0)):
            for question in made(NeedleTask("mine", haystack, depth=depth), count=2):
                assert question.about["depths"][0] == pytest.approx(near, abs=4)


def test_depths_are_spread_and_the_same_needle_is_hidden_at_each_length():
    short, long = made("niah_single_2", 3000, 40), made("niah_single_2", 9000, 40)
    assert [q.expected for q in short] == [q.expected for q in long]
    depths = [q.about["depths"][0] for q in long]
    assert min(depths) < 10 and max(depths) > 90 and len(set(depths)) > 20


@pytest.mark.parametrize(
    "settings", [{"haystack": "hay"}, {"key_kind": "x"}, {"value_kind": "x"}, {"keys": 0}, {"values": 41}, {"depth": 101}]
)
def test_a_setting_that_is_no_setting_is_an_error(settings):
    with pytest.raises(ValueError, match=str(next(iter(settings.values())))):
        NeedleTask("mine", **settings)


# How long it is.


@pytest.mark.parametrize("make", [byte_level, pieces])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1500, 5000])
def test_prompt_and_answer_fill_the_length_and_never_more(task, length, make):
    tokenizer = make()
    for question in made(task, length, 8, tokenizer=tokenizer):
        tokens = len(tokenizer.encode(question.prompt)) + TOKENS_TO_GENERATE
        assert question.about["length"] == tokens <= length
        assert tokens > length - 300  # no more than the longest sentence and what the first sample's words are shorter


def test_a_haystack_is_repeated_where_it_is_too_short():
    small = Haystack("One two three. Four five six! Seven eight.", "small")
    kit = Kitchen(TASKS["niah_single_2"], WORDS, small, 0)
    (recipe,) = kit.recipes(1, 4000, lambda texts: count_tokens(byte_level(), texts), "hash")
    assert recipe.units > 10 * small.words and 3900 < recipe.length <= 4000


def test_too_short_a_length_names_both_sizes():
    with pytest.raises(ValueError, match=r"tokens is the shortest this task has, and there is room for 72"):
        made("niah_single_1", length=200)


def test_few_texts_are_encoded_at_any_length():
    encoded = []

    def count(texts):
        encoded.extend(map(len, texts))
        return [len(text) // 4 for text in texts]

    for task in TASKS:
        encoded.clear()
        (recipe,) = kitchen(task).recipes(1, 2**18, count, "hash")
        assert 0.99 * 2**18 < recipe.length <= 2**18
        assert sum(encoded) < 8 * 4 * 2**18, task  # eight prompts' worth, the tally of the haystack included


# The same everywhere.


def test_prompts_are_the_same_in_every_process():
    """The digest was taken once; Python's hash seed is another in every process of tests."""
    text = json.dumps([[q.prompt, q.expected, q.about] for task in TASKS for q in made(task, 2500, 2)])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "04b1169191de21a4"


def test_samples_differ_by_seed_and_do_not_depend_on_how_many_there_are():
    assert [q.prompt for q in made("niah_multivalue", count=3)] == [q.prompt for q in made("niah_multivalue", count=7)][:3]
    assert not {q.expected for q in made("niah_single_1")} & {q.expected for q in made("niah_single_1", seed=1)}


def test_recipes_are_kept_and_found_again_by_all_their_settings(tmp_path):
    tokenizer, calls = byte_level(), []

    def count(texts):
        calls.append(len(texts))
        return count_tokens(tokenizer, texts)

    def get(task="niah_single_2", number=3, length=2500, seed=0, name="a"):
        calls.clear()
        return samples(kitchen(task, seed), number, length, count, name, Store(tmp_path / "kept"))

    first = get()
    assert calls and get() == first and not calls
    for changed in ({"task": "niah_single_3"}, {"number": 4}, {"length": 2600}, {"seed": 1}, {"name": "b"}):
        get(**changed)
        assert calls, changed
    assert len(list((tmp_path / "kept").iterdir())) == 6


def test_a_damaged_file_of_recipes_is_made_again(tmp_path):
    kit, store = kitchen("niah_single_1"), Store(tmp_path)

    def get():
        return samples(kit, 2, 2500, lambda texts: count_tokens(byte_level(), texts), "a", store)

    first = get()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for broken in (b"", whole[: len(whole) // 2], whole.replace(b'"seed": 0', b'"seed": 7')):
        path.write_bytes(broken)
        assert get() == first and path.read_bytes() == whole


def test_a_tokenizers_hash_does_not_change_by_its_use():
    tokenizer = pieces()
    before = tokenizer_hash(tokenizer)
    tokenizer.pad_token = "</s>"
    tokenizer(["a", "much longer text"], padding=True, truncation=True, max_length=3)
    assert tokenizer_hash(tokenizer) == before != tokenizer_hash(byte_level())
    assert count_tokens(tokenizer, [ESSAY[:999]]) == [len(tokenizer.encode(ESSAY[:999]))]


# The score.


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [
        (" 1234567.", ("1234567",), 1),
        ("", ("1234567",), 0),
        ("123456", ("1234567",), 0),
        ("91234567", ("1234567",), 1),  # RULER looks for the value anywhere
        ("d, c, b and a", ("a-1", "b-1"), 0),
        ("B-1, then A-1", ("a-1", "b-1"), 1),
        ("1, 2, and 3", ("1", "2", "3", "4"), 0.75),
        ("4", ("1", "2", "3", "4"), 0.25),
        ("Green-HOUSE", ("green-house",), 1),
    ],
)
def test_string_match_all_is_the_share_found_whatever_order_and_case(answer, expected, score):
    assert string_match_all(answer, expected) == score


# The suite.


def run(model, tmp_path, **options):
    return table2(model, SuiteOptions(data=essays(tmp_path), lengths=(1400, 2100), samples=3, **options))


@pytest.mark.parametrize("make", [byte_level, pieces])
def test_a_perfect_memory_scores_100_and_none_scores_0(tmp_path, make):
    perfect, blind = run(Says(recall, make()), tmp_path), run(Says(lambda prompt: " nothing.", make()), tmp_path)
    names = [(task, length) for task in TASKS for length in ("1400", "2100")]
    assert [(s.task, s.metric, s.value, s.count, s.truncated) for s in perfect.scores] == [(*n, 100, 3, 0) for n in names]
    assert [(s.value, s.stderr) for s in blind.scores] == [(0, 0)] * len(names)
    assert perfect.suite == "table2" and all("essays.txt" in s.data for s in perfect.scores if s.task == "niah_single_3")


def test_half_of_the_values_are_half_a_score(tmp_path):
    half = run(Says(lambda prompt: " ".join(recall(prompt).split()[:2])), tmp_path, tasks=("niah_multivalue",))
    assert [s.value for s in half.scores] == [50, 50]


def test_every_sample_is_kept_for_heat_maps(tmp_path):
    result = run(Says(recall), tmp_path)
    kept = result.extra["samples"]
    assert len(kept) == 7 * 2 * 3
    one = next(row for row in kept if row["task"] == "niah_multiquery" and row["context"] == 2100)
    assert set(one) == {"task", "context", "index", "length", "tokens", "depths", "expected", "got", "score"}
    assert one["score"] == 100 and one["length"] == one["tokens"] + 128 <= 2100 and len(one["depths"]) == 4
    json.dumps(result.to_dict())


def test_a_length_beyond_the_models_limit_is_not_run_unless_cutting_is_allowed(tmp_path):
    short = run(Says(recall, max_length=1400), tmp_path, tasks=("niah_single_1",))
    assert short.scores[0].value == 100 and short.scores[1].value is None
    assert "reads 1400 tokens at most, and a prompt has 2100" in short.scores[1].note
    cut = run(Says(lambda prompt: "", max_length=1400), tmp_path, tasks=("niah_single_1",), allow_truncation=True)
    assert [(s.value, s.truncated, s.count) for s in cut.scores] == [(0, 0, 3), (0, 3, 3)]


def test_a_length_too_short_for_a_task_is_not_run_and_the_others_are(tmp_path):
    options = SuiteOptions(data=essays(tmp_path), lengths=(620, 1400), samples=2, tasks=("niah_single_1", "niah_multiquery"))
    scores = table2(Says(recall), options).scores
    assert [s.value for s in scores] == [100, 100, None, 100] and "there is room for 492" in scores[2].note


def test_limit_and_cache_are_options(tmp_path):
    model = Says(recall)
    result = run(model, tmp_path, limit=2, cache=tmp_path / "cache", tasks=("niah_multikey_2",))
    assert [s.count for s in result.scores] == [2, 2] and len(list((tmp_path / "cache").iterdir())) == 2


def test_the_suite_is_found_by_its_name(tmp_path):
    options = SuiteOptions(data=essays(tmp_path), lengths=(1400,), samples=1, tasks=("niah_single_1",))
    assert SUITES["table2"](Says(recall), options).scores[0].value == 100


def test_batch_padding_and_chunk_change_no_answer(tmp_path):
    """A real model in fp64, where sums in another order change nothing that greedy decoding sees, on prompts of unequal length."""
    torch.manual_seed(0)
    config = ProteusConfig(mixer="titans", hidden_size=16, num_heads=2, num_hidden_layers=1, chunk_size=16, memory_blocks=4)
    model = ProteusForCausalLM(config).double()
    got = {}
    for batch_size, chunk in ((1, 5000), (3, 5000), (3, 97)):
        asked = LanguageModel(model, byte_level(), batch_size=batch_size, chunk=chunk)
        options = SuiteOptions(data=essays(tmp_path), lengths=(1000,), samples=2, tasks=("niah_single_2", "niah_multiquery"))
        result = table2(asked, options)
        got[batch_size, chunk] = [row["got"] for row in result.extra["samples"]]
        assert len({row["tokens"] for row in result.extra["samples"]}) > 1
    assert got[1, 5000] == got[3, 5000] == got[3, 97] and len(set(got[1, 5000])) > 1


@pytest.mark.shared
def test_rulers_words_and_a_free_essay_are_read_from_the_data_folder(shared):
    data = shared / "data" / "eval"
    words = load_words(data)
    assert len(words.adjectives) > 900 and len(words.nouns) > 6000 and words.hash != WORDS.hash
    result = table2(Says(recall), SuiteOptions(data=data, lengths=(4096,), samples=2))
    assert [s.value for s in result.scores] == [100] * 7
    assert "public_domain_essays.jsonl.gz" in result.scores[1].data and "ruler_words.json.gz" in result.scores[0].data
