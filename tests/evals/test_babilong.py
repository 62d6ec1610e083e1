"""BABILong: bAbI's facts in their order in running text, upstream's words around them, and upstream's judgement."""

import json
import re

import pytest

from proteus_lm.evals.babilong import Scatter, babilong, compare, load_stories
from proteus_lm.evals.babilong.facts import TASKS, Stories, Story
from proteus_lm.evals.babilong.prompts import PROMPTS, prompt
from proteus_lm.evals.babilong.samples import LABELS, TOKENS_TO_GENERATE
from proteus_lm.evals.long_context import Haystack, count_tokens
from proteus_lm.evals.suite import SUITES, MissingData, SuiteOptions

from .recallers import ESSAY, Says, byte_level, essays, pieces

HAYSTACK = Haystack(ESSAY, "test")
ANSWERS = {
    "qa1": ("Where is Mary{}?", "kitchen"),
    "qa2": ("Where is the milk{}?", "garden"),
    "qa3": ("Where was the milk before the office{}?", "hallway"),
    "qa4": ("What is north of the office{}?", "bathroom"),
    "qa5": ("Who gave the milk{}?", "Fred"),
    "qa6": ("Is Mary in the office{}?", "yes"),
    "qa7": ("How many objects is Mary carrying{}?", "none"),
    "qa8": ("What is Mary carrying{}?", "milk,football"),
    "qa9": ("Is Mary in the office{}?", "no"),
    "qa10": ("Is Mary in the office{}?", "maybe"),
}


def stories(task: str) -> Stories:
    """Three stories of a task, which a number in the question tells apart."""
    facts = ("Mary went home first.", "Fred took the milk there.", "Bill slept until noon.")
    question, answer = ANSWERS[task]
    return Stories(tuple(Story(facts, question.format(f" {i}"), answer, (1, 2)) for i in range(3)), "test")


def data(folder):
    """A data folder with stories and a haystack."""
    rows = [
        {"task": task, "facts": s.facts, "question": s.question, "answer": s.answer, "supporting": s.supporting}
        for task in TASKS
        for s in stories(task).stories
    ]
    (folder / "babi.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return essays(folder)


def recall(text: str) -> str:
    """The right answer, by the task's instruction and question."""
    question = text.rsplit("Question: ", 1)[1]
    (task,) = [t for t in TASKS if text.startswith(PROMPTS[t].text())]
    return f"\nAnswer: {next(s.answer for s in stories(task).stories if s.question == question)}."


# The prompt.


def test_the_prompt_has_upstreams_order_and_words():
    text = prompt("qa4", " The text. ", "What is north?")
    assert text == (
        "I will give you context with the facts about different people, their location and actions, hidden in some random text "
        "and a question. You need to answer the question based only on the information from the facts.\n\n"
        "<example>\nThe hallway is south of the kitchen. The bedroom is north of the kitchen. What is the kitchen south of?\n"
        "Answer: bedroom\n</example>\n"
        "<example>\nThe garden is west of the bedroom. The bedroom is west of the kitchen. What is west of the bedroom?\n"
        "Answer: garden\n</example>\n\n"
        "Your answer should contain only one word - location. Do not write anything else after that.\n\n"
        "<context>\nThe text.\n</context>\n\nQuestion: What is north?"
    )


@pytest.mark.parametrize("task", TASKS)
def test_examples_would_be_judged_right_or_name_no_label(task):
    """Upstream's own examples of answers, as far as they use the task's labels, are right answers by its judgement."""
    for _, answer in PROMPTS[task].examples:
        words = set(re.findall(r"\w+", answer.lower())) & LABELS[task]
        if task in ("qa4", "qa6", "qa7", "qa8", "qa9", "qa10"):
            assert compare(task, "", answer, f"{answer}.") and words


@pytest.mark.parametrize("make", [byte_level, pieces])
@pytest.mark.parametrize("length", [2000, 5000])
def test_facts_stand_in_order_between_sentences_and_the_length_is_kept(length, make):
    tokenizer = make()
    scatter = Scatter("qa2", stories("qa2"), HAYSTACK, 0)
    recipes = scatter.recipes(3, length, lambda texts: count_tokens(tokenizer, texts), f"hash {make.__name__}")
    assert len(recipes) == 3
    for recipe in recipes:
        question = scatter.question(recipe)
        assert recipe.length == len(tokenizer.encode(question.prompt)) + TOKENS_TO_GENERATE <= length
        assert recipe.length > length - 60
        context = question.prompt.split("<context>\n")[1].split("\n</context>")[0]
        facts = scatter.stories.stories[recipe.index].facts
        places = [context.index(fact) for fact in facts]
        assert places == sorted(places)
        for fact, place in zip(facts, places):
            cut = context.endswith(" ".join(facts[facts.index(fact) :]))  # behind the last sentence, which may be cut
            assert context.count(fact) == 1 and (cut or place == 0 or context[place - 2] in ".?;")
        text = context
        for fact in facts:
            text = text.replace(fact, " ")
        assert " ".join(text.split()) in " ".join([ESSAY] * 3)
        assert len(question.about["depths"]) == 2 and question.about["depths"][0] <= question.about["depths"][1]


def test_nothing_but_the_text_grows_with_the_length():
    scatter = Scatter("qa1", stories("qa1"), HAYSTACK, 0)
    count = lambda texts: count_tokens(byte_level(), texts)  # noqa: E731
    short, long = scatter.recipes(3, 2000, count, "a"), scatter.recipes(3, 6000, count, "a")
    assert [r.index for r in short] == [r.index for r in long]
    assert scatter.recipes(2, 2000, count, "a") == short[:2]
    depths = [[scatter.question(r).about["depths"] for r in rs] for rs in (short, long)]
    assert all(abs(a - b) < 25 for one, other in zip(*depths) for a, b in zip(one, other))


def test_stories_whose_facts_have_no_room_are_passed_over():
    long = Story(tuple(f"Mary went to room {i} and came back." for i in range(99)), "Where is Mary?", "kitchen", (0,))
    mixed = Stories((long, *stories("qa1").stories), "test")
    found = Scatter("qa1", mixed, HAYSTACK, 0).recipes(4, 2000, lambda texts: count_tokens(byte_level(), texts), "a")
    assert sorted(r.index for r in found) == [1, 2, 3]


# The judgement.


@pytest.mark.parametrize(
    ("task", "question", "target", "output", "right"),
    [
        ("qa1", "Where is John?", "kitchen", "The most recent location of John is kitchen.", True),
        ("qa1", "Where is John?", "kitchen", " KITCHEN", True),
        ("qa1", "Where is John?", "kitchen", "He is in the garden. Or the kitchen.", False),  # the first sentence counts
        ("qa1", "Where is John?", "kitchen", "kitchen or garden", False),  # two labels
        ("qa1", "Where is John?", "kitchen", "kitchen<example>garden", True),
        ("qa3", "Where was the milk before the office?", "garden", "Before the office the milk was in the garden", True),
        ("qa4", "What is the bathroom east of?", "bedroom", "bathroom", False),  # named in the question
        ("qa5", "Who gave the milk?", "Fred", "fred", True),
        ("qa6", "Is John in the office?", "no", "I do not know", False),  # upstream finds `no` in `not`
        ("qa7", "How many objects?", "none", "none", True),  # upstream finds `one` in `none`, and says false
        ("qa7", "How many objects?", "one", "none", False),
        ("qa8", "What is Mary carrying?", "milk,football", "football and milk", True),
        ("qa8", "What is Mary carrying?", "milk,football", "milk", False),
        ("qa8", "What is Mary carrying?", "milk", "milk, apple", False),
        ("qa10", "Is Bill there?", "maybe", "maybe", True),
        ("qa10", "Is Bill there?", "maybe", "", False),
    ],
)
def test_an_answer_is_right_where_it_names_the_target_alone(task, question, target, output, right):
    assert compare(task, question, target, output) is right


# Stories.


def test_babis_own_files_are_read(tmp_path):
    folder = tmp_path / "babi"
    folder.mkdir()
    (folder / "qa1_single-supporting-fact_test.txt").write_text(
        "1 Mary moved to the bathroom.\n2 John went to the hallway.\n3 Where is Mary? \tbathroom\t1\n4 Daniel went back.\n"
        "5 Where is John? \thallway\t2\n1 Sandra moved to the garden.\n2 Where is Sandra? \tgarden\t1\n"
    )
    found = load_stories("qa1", tmp_path).stories
    assert [(len(s.facts), s.question, s.answer, s.supporting) for s in found] == [
        (2, "Where is Mary?", "bathroom", (0,)),
        (3, "Where is John?", "hallway", (1,)),
        (1, "Where is Sandra?", "garden", (0,)),
    ]
    (folder / "qa2_test.txt").write_text("")
    (folder / "qa2_x_test.txt").write_text("Mary moved.\n")
    with pytest.raises(ValueError, match="line 1 does not begin with a number"):
        load_stories("qa2", tmp_path)


def test_no_stories_say_how_to_give_them(tmp_path):
    with pytest.raises(MissingData, match=r"stories of qa7 are not here.*babi_qa1_10_test.jsonl.gz"):
        load_stories("qa7", tmp_path)
    result = babilong(Says(lambda text: ""), SuiteOptions(lengths=(2000,), tasks=("qa1",)))
    assert result.scores[0].value is None and "Give --data DIR" in result.scores[0].note


# The suite.


@pytest.mark.parametrize("make", [byte_level, pieces])
def test_a_perfect_memory_scores_100_and_none_scores_0(tmp_path, make):
    options = SuiteOptions(data=data(tmp_path), lengths=(2100, 3000), samples=3)
    perfect, blind = babilong(Says(recall, make()), options), babilong(Says(lambda text: "", make()), options)
    assert [(s.task, s.metric, s.value, s.count) for s in perfect.scores] == [
        (task, length, 100, 3) for task in TASKS for length in ("2100", "3000")
    ]
    assert {s.value for s in blind.scores} == {0}
    assert len(perfect.extra["samples"]) == 60
    assert set(perfect.extra["samples"][0]) == {
        *("task", "context", "index", "length", "question", "tokens", "depths", "expected", "got", "score"),
    }
    json.dumps(perfect.to_dict())


def test_too_few_stories_are_said(tmp_path):
    options = SuiteOptions(data=data(tmp_path), lengths=(600, 2100), samples=9, tasks=("qa1",), cache=tmp_path / "cache")
    short, enough = SUITES["babilong"](Says(recall), options).scores
    assert short.value is None and "no story of qa1 has room for its facts in 600 tokens" in short.note
    assert enough.count == 3 and "3 samples, for want of stories" in enough.note
    assert babilong(Says(recall), options).scores == (short, enough)  # from the cache


@pytest.mark.shared
def test_the_real_stories_are_judged_right_where_the_answer_is(shared):
    folder = shared / "data" / "eval"
    for task in TASKS:
        for story in load_stories(task, folder).stories:
            assert compare(task, story.question, story.answer, f"{story.answer}."), story
    model = Says(lambda text: "")
    result = babilong(model, SuiteOptions(data=folder, lengths=(2048,), samples=2, tasks=("qa1", "qa3")))
    assert [s.count for s in result.scores] == [2, 2] and "babi_qa1_10_test.jsonl.gz" in result.scores[0].data
