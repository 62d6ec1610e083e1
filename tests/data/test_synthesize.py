"""Recall tasks as data to train on: the rows are the task's, the ids are its numbers, and the task is known again."""

import json

import numpy as np
import pytest

from proteus_lm.data.dataset import TokenDataset
from proteus_lm.data.loader import Loader
from proteus_lm.data.synthesize import TASK_FILE, TaskSpec, synthesize, task_of


@pytest.fixture(scope="module", params=["mqar", "stream"])
def made(request, tmp_path_factory):
    spec = TaskSpec(request.param, length=24, pairs=4, vocab=24, rows=300, seed=5)
    folder = tmp_path_factory.mktemp(request.param) / "data"
    synthesize(spec, folder, progress=False)
    return spec, folder


def test_documents_are_the_rows_of_the_task_with_an_end_token(made):
    spec, folder = made
    rows = {tuple(row) for first, n in ((0, 256), (256, 44)) for row in spec.make(n, 5 + first).tokens.tolist()}
    documents = []
    for split in ("train", "validation"):
        data = TokenDataset(folder, split)
        documents += [tuple(int(t) for t in data.document(i)) for i in range(data.documents)]
    assert len(documents) == 300
    assert {d[:-1] for d in documents} == rows
    assert {d[-1] for d in documents} == {spec.vocab}


def test_windows_of_the_named_context_hold_whole_rows(made):
    spec, folder = made
    batch = Loader(TokenDataset(folder, "train"), batch_size=4, context=spec.length + 1, seed=0, allow_short_documents=True).batch(
        0
    )
    assert (np.asarray(batch.tokens)[:, spec.length] == spec.vocab).all()


def test_the_task_is_known_again_and_its_fresh_rows_are_not_in_the_data(made):
    spec, folder = made
    assert task_of(folder) == spec
    data = TokenDataset(folder, "train")
    seen = {tuple(int(t) for t in data.document(i)[:-1]) for i in range(data.documents)}
    fresh = {tuple(row) for row in spec.fresh(50).tokens.tolist()}
    assert not seen & fresh


def test_a_document_can_hold_several_rows_one_after_the_other(tmp_path):
    spec = TaskSpec("mqar", length=16, pairs=2, vocab=8, rows=20, seed=3, episodes=3)
    synthesize(spec, tmp_path / "data", progress=False)
    wanted = {tuple(row) for row in spec.make(60, 3).tokens.view(20, 48).tolist()}
    data = [TokenDataset(tmp_path / "data", split) for split in ("train", "validation")]
    found = {tuple(int(t) for t in d.document(i)) for d in data for i in range(d.documents)}
    assert {row[:-1] for row in found} == wanted
    assert spec.context == 49 == len(next(iter(found)))
    assert task_of(tmp_path / "data") == spec
    assert spec.fresh(5).tokens.shape == (5, 16)


def test_the_tokenizer_is_that_of_transformers_too(made):
    from transformers import AutoTokenizer

    spec, folder = made
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("3 17 0") == [3, 17, 0]
    assert tokenizer.decode([3, 17, 0]) == "3 17 0"
    assert tokenizer.eos_token_id == spec.vocab


def test_the_same_specification_gives_the_same_data_and_is_used_as_it_is(made, tmp_path):
    spec, folder = made
    again = synthesize(spec, tmp_path / "again", progress=False)
    for split, part in again.splits.items():
        other = TokenDataset(folder, split).manifest.splits[split]
        assert [s.sha256 for s in part.shards] == [s.sha256 for s in other.shards]
    assert synthesize(spec, folder, progress=False).splits == TokenDataset(folder).manifest.splits


def test_other_data_in_the_folder_are_left_alone(made):
    spec, folder = made
    with pytest.raises(FileExistsError, match="prepared in another way"):
        synthesize(TaskSpec(spec.task, 24, 4, 24, 200, seed=6), folder, progress=False)
    assert task_of(folder) == spec


def test_data_of_another_origin_have_no_task_and_a_spoilt_file_is_an_error(tmp_path):
    assert task_of(tmp_path) is None
    (tmp_path / TASK_FILE).write_text(json.dumps({"task": "mqar"}))
    with pytest.raises(ValueError, match=r"task\.json cannot be read"):
        task_of(tmp_path)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"task": "copy"}, "task 'copy' is not known; use one of mqar, stream"),
        ({"rows": 1}, "rows is 1"),
        ({"episodes": 0}, "episodes is 0"),
        ({"length": 15}, "length is 15 with 4 pairs"),
        ({"task": "stream", "pairs": 12}, "vocab is 24 with 12 keys"),
    ],
)
def test_tasks_that_cannot_be_made_are_refused(sizes, says):
    with pytest.raises(ValueError, match=says):
        TaskSpec(**{"task": "mqar", "length": 24, "pairs": 4, "vocab": 24, "rows": 10, **sizes})
