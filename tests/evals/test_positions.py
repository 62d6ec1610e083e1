"""Figure 4: perplexity by position of whole documents, for our models and others, with the state carried."""

import gzip
import json
import math

import numpy as np
import pytest
import tokenizers
import torch

from proteus_lm.data.dataset import TokenDataset
from proteus_lm.data.prepare import prepare
from proteus_lm.data.tokenizer import byte_tokenizer
from proteus_lm.evals import compare
from proteus_lm.evals.language_model import LanguageModel
from proteus_lm.evals.perplexity import PerplexityResult, evaluate
from proteus_lm.evals.positions import LONG_TEXTS, load_documents, octave_edges, paired_raw, perplexity_by_position
from proteus_lm.evals.suite import SUITES, SuiteOptions, SuiteResult
from proteus_lm.evals.windows import choose_windows

from ..mixers.models import make, options
from .doubles import Recurrent, texts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder in the layout of the evaluation files: three long texts, one short."""
    import gzip

    folder = tmp_path_factory.mktemp("data")
    words = np.random.default_rng(0).choice(["memory", "opens", "é", "late", "\n"], 200)
    rows = [{"text": " ".join(words[:n])} for n in (200, 120, 60, 3)]
    (folder / LONG_TEXTS).write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return folder


def ours(tokenizer, mixer="comba", seed=0, **fields):
    return LanguageModel(
        make(options(mixer, vocab_size=257, **fields), torch.float32, seed), tokenizer, name=mixer, batch_size=2, chunk=50
    )


def test_the_edges_of_bins_double_and_do_not_depend_on_the_model():
    assert octave_edges(4096) == (0, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)
    assert octave_edges(300) == (0, 256, 300)
    assert octave_edges(32768)[-5:] == (16384, 20480, 24576, 28672, 32768)


def test_each_position_has_the_loss_of_one_long_forward(tokenizer, data):
    lm = ours(tokenizer)
    result = perplexity_by_position(lm, SuiteOptions(data=data))
    raw = paired_raw(result)
    text = json.loads(__import__("gzip").decompress((data / LONG_TEXTS).read_bytes()).splitlines()[0])["text"]
    ids = torch.tensor([[*text.encode(), 256]])
    with torch.no_grad():
        logp = lm.model(input_ids=ids[:, :-1]).logits.double().log_softmax(-1)[0]
    losses = -logp.gather(-1, ids[0, 1:, None])[:, 0].numpy()
    expected = [losses[a:b].sum() for a, b in zip(raw.edges, raw.edges[1:])]
    assert raw.sums[0] == pytest.approx(expected, rel=1e-5)
    assert raw.counts[0].sum() == len(text.encode())  # every token but the first is predicted, the end token too


def test_scores_are_perplexities_with_errors_over_documents(tokenizer, data):
    result = perplexity_by_position(ours(tokenizer), SuiteOptions(data=data))
    raw = paired_raw(result)
    whole = result.score("all", "perplexity")
    assert whole.value == pytest.approx(math.exp(raw.whole.mean))
    assert whole.stderr == pytest.approx(whole.value * raw.whole.error)
    assert whole.count == raw.whole.tokens == sum(s.count for s in result.scores[1:])
    assert raw.whole.groups == 4


def test_the_longest_length_is_where_reading_stops_and_the_rest_is_counted(tokenizer, data):
    result = perplexity_by_position(ours(tokenizer), SuiteOptions(data=data, lengths=(100, 300), limit=2))
    raw = paired_raw(result)
    assert raw.edges[-1] == 300
    assert [w.length for w in raw.windows] == [300, 300]
    assert raw.left_out.tails > 0


def test_a_prepared_folder_is_read_with_the_models_own_tokenizer(tokenizer, tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(6):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"{i} The memory of a machine. " * 9)
    prepare(tmp_path / "texts", "byte", tmp_path / "data", validation_fraction=0.5, progress=False)
    result = perplexity_by_position(ours(tokenizer), SuiteOptions(data=tmp_path / "data"))
    assert result.scores[0].data.endswith("(validation)")
    assert result.scores[0].value > 1


WORDS = ["low", "lower", "lowest", "new", "newer"]


def word_tokenizer(folder):
    """A tokenizer whose text of ids gives other ids again: it forgets the spaces."""
    built = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "</s>"])
    built.train_from_iterator([" ".join(WORDS)] * 9, trainer)
    folder.mkdir()
    built.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("kind", ["byte", "words"])
@pytest.mark.parametrize("limit", [None, 2])
def test_the_ids_of_a_prepared_folder_are_read_as_they_are_by_a_model_of_its_tokenizer(kind, limit, tmp_path):
    from transformers import AutoTokenizer

    rows = [{"text": f"{i} low <|endoftext|> lower</s> newest " * (i + 2)} for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = "byte" if kind == "byte" else word_tokenizer(tmp_path / "words")
    prepare(tmp_path / "rows.jsonl", spec, tmp_path / "data", validation_fraction=0.5, progress=False)
    dataset = TokenDataset(tmp_path / "data", "validation")
    dataset.tokenizer.save(tmp_path / "model")
    lm = ours(AutoTokenizer.from_pretrained(tmp_path / "model"))
    documents, _ = load_documents(lm, SuiteOptions(data=tmp_path / "data", limit=limit))
    assert documents.documents == (limit or dataset.documents) > 1
    assert all((documents.document(i) == dataset.document(i)).all() for i in range(documents.documents))
    assert documents.bytes / documents.tokens == pytest.approx(dataset.bytes / dataset.tokens, rel=1e-2)  # whole bytes


def test_a_special_token_written_in_a_text_is_text_to_a_model_of_another_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / LONG_TEXTS).write_bytes(gzip.compress(json.dumps({"text": "a <|endoftext|> b"}).encode()))
    byte_tokenizer().save(tmp_path / "model")
    config = json.loads((tmp_path / "model/tokenizer_config.json").read_text())
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(config | {"split_special_tokens": False}))
    lm = ours(AutoTokenizer.from_pretrained(tmp_path / "model"))
    documents, _ = load_documents(lm, SuiteOptions(data=tmp_path))
    assert documents.document(0).tolist() == [*b"a <|endoftext|> b", 256]


def test_without_documents_it_is_not_run_and_says_what_to_give(tokenizer, tmp_path):
    for options_ in (SuiteOptions(), SuiteOptions(data=tmp_path)):
        (score,) = perplexity_by_position(ours(tokenizer), options_).scores
        assert score.value is None
        assert "give --data" in score.note
    with gzip.open(tmp_path / "public_domain_essays.jsonl.gz", "wt"):
        pass
    with pytest.raises(ValueError, match="holds no text; give --data"):
        perplexity_by_position(ours(tokenizer), SuiteOptions(data=tmp_path))


def test_a_task_it_does_not_have_is_refused(tokenizer):
    with pytest.raises(ValueError, match="no task piqa in this suite; it has all"):
        perplexity_by_position(ours(tokenizer), SuiteOptions(tasks=("piqa",)))


def test_a_saved_result_can_be_paired_with_another(tokenizer, data, tmp_path):
    raws = []
    for seed in (0, 1):
        path = tmp_path / f"{seed}.json"
        SUITES["fig4"](ours(tokenizer, seed=seed), SuiteOptions(data=data)).save(path)
        raws.append(paired_raw(SuiteResult.load(path)))
    difference = compare(*raws, names=("a", "b"))
    assert difference.whole.mean == pytest.approx(raws[1].whole.mean - raws[0].whole.mean, abs=1e-12)
    assert difference.whole.groups == 4


def limited(tokenizer, allow):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=257,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=400,
    )
    return LanguageModel(GPTNeoXForCausalLM(config).eval(), tokenizer, name="neox", batch_size=2, chunk=64, allow_truncation=allow)


def test_a_model_with_a_position_limit_refuses_longer_documents_unless_cutting_is_allowed(tokenizer, data):
    with pytest.raises(ValueError, match=r"documents are longer than the 400 positions of neox"):
        perplexity_by_position(limited(tokenizer, False), SuiteOptions(data=data))
    result = perplexity_by_position(limited(tokenizer, True), SuiteOptions(data=data))
    assert result.scores[0].truncated == 2  # of about 900 and 550 bytes
    assert paired_raw(result).edges[-1] == 400
    short = perplexity_by_position(limited(tokenizer, False), SuiteOptions(data=data, lengths=(400,)))
    assert short.scores[0].truncated == 0
    assert short.scores[0].value == pytest.approx(result.scores[0].value)


def test_raw_rows_give_the_same_result_back():
    result = evaluate(Recurrent(), texts(40, 41, 42), context=8, bins=4, training_context=4, bytes_per_token=1.5)
    again = PerplexityResult.from_raw(json.loads(json.dumps(result.to_raw())))
    assert again.to_dict() == result.to_dict()
    assert (again.sums == result.sums).all()
    assert compare(result, again, names=("a", "b")).whole.mean == 0
    with pytest.raises(ValueError, match="no raw rows"):
        PerplexityResult.from_raw({"windows": []})


def test_documents_can_be_read_up_to_a_longest_length():
    windows, left = choose_windows(texts(10, 4, 9), None, longest=5)
    assert [(w.document, w.start, w.length) for w in windows] == [(0, 0, 5), (1, 0, 3), (2, 0, 5)]
    assert (left.first, left.tails) == (3, 4 + 3)
    with pytest.raises(ValueError, match="longest is 0"):
        choose_windows(texts(10), None, longest=0)
