"""One model behind one interface: batch, padding, pieces and cache change no score; nothing is cut in silence."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoTokenizer,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)

from proteus_lm import ProteusConfig, ProteusForCausalLM
from proteus_lm.data.tokenizer import byte_tokenizer
from proteus_lm.evals import language_model
from proteus_lm.evals.language_model import LanguageModel
from proteus_lm.mixers import registry

VOCAB, LIMIT = 257, 96
OTHERS = ("llama", "neox", "mamba", "openai")
EVERY = (*registry, "mac", *OTHERS)
# Sums of some tens of log p of order 6; fp32 logits of another order of operations.
CLOSE = 1e-3


def ours(mixer: str) -> ProteusForCausalLM:
    special = {"chunk_size": 8, "memory_expansion": 2, "memory_blocks": 4, "memory_context": 32}
    form = {"titans_variant": "mac", "segment_length": 16, "persistent_tokens": 2} if mixer == "mac" else {}
    mixer = "titans" if form else mixer
    fields = {name: value for name, value in special.items() if name in registry[mixer].fields | {"memory_context"}} | form
    return ProteusForCausalLM(ProteusConfig(mixer=mixer, vocab_size=VOCAB, hidden_size=32, num_heads=2, **fields))


def other(kind: str):
    common = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": 256}
    attention = common | {"intermediate_size": 64, "num_attention_heads": 2, "max_position_embeddings": LIMIT}
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**attention))
    if kind == "neox":
        return GPTNeoXForCausalLM(GPTNeoXConfig(**attention))
    if kind == "mamba":
        return MambaForCausalLM(MambaConfig(**common, state_size=8))
    return OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=LIMIT))


_MODELS: dict[str, torch.nn.Module] = {}


def model(kind: str):
    """A model whose context matters: its logits are far from uniform."""
    if kind not in _MODELS:
        torch.manual_seed(0)
        made = other(kind) if kind in OTHERS else ours(kind)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if parameter.dim() == 2 and not any(part in name for part in ("norm", "A_log", "lm_head", "embed")):
                    parameter.mul_(4)
            made.get_output_embeddings().weight.mul_(8)
        _MODELS[kind] = made.eval()
    return _MODELS[kind]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save(folder)
    return AutoTokenizer.from_pretrained(folder)


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PAIRS = [(ids(n, n), ids(m, 100 + m)) for n, m in ((1, 3), (40, 1), (7, 20), (33, 2), (20, 8), (60, 30))]
PROMPTS = [ids(n, n) for n in (3, 41, 17, 17, 1)]


def direct(net, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """By one forward of one row, the plain way."""
    with torch.no_grad():
        logits = net(input_ids=torch.tensor([context + continuation])).logits[0].double()
    rows = logits[len(context) - 1 : -1]
    target = torch.tensor(continuation)
    return float(rows.log_softmax(-1).gather(-1, target[:, None]).sum()), bool((rows.argmax(-1) == target).all())


@cache
def written(kind: str) -> tuple[list[int], ...]:
    """The eight greedy tokens after each of the prompts."""
    return tuple(greedy(model(kind), prompt, 8) for prompt in PROMPTS)


def greedy(net, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, each by a whole forward without cache."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(net(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        if tokens[-1] == 256:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize(("batch_size", "chunk"), [(1, 2048), (4, 2048), (3, 7)])
def test_loglikelihoods_are_those_of_one_plain_forward_under_any_batch_and_chunk(kind, batch_size, chunk, tokenizer):
    net = model(kind)
    found = LanguageModel(net, tokenizer, batch_size=batch_size, chunk=chunk).loglikelihoods(PAIRS)
    wanted = [direct(net, *pair) for pair in PAIRS]
    assert [total for total, _ in found] == pytest.approx([total for total, _ in wanted], abs=CLOSE)
    assert [same for _, same in found] == [same for _, same in wanted]


@pytest.mark.parametrize("kind", EVERY)
def test_a_greedy_continuation_is_known_as_one_and_is_what_generate_writes(kind, tokenizer):
    lm = LanguageModel(model(kind), tokenizer, batch_size=4)
    assert all(same for _, same in lm.loglikelihoods(list(zip(PROMPTS, written(kind)))))
    wrong = [[*w[:-1], (w[-1] + 1) % 256] for w in written(kind)]
    assert not any(same for _, same in lm.loglikelihoods(list(zip(PROMPTS, wrong))))


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize(("batch_size", "chunk"), [(1, 2048), (6, 2048), (4, 5)])
def test_generation_of_unequal_prompts_in_a_batch_is_that_of_each_alone(kind, batch_size, chunk, tokenizer):
    """Row 35: recurrent models of transformers too, whose states padding would enter."""
    wanted = [tokenizer.decode([t for t in tokens if t != 256]) for tokens in written(kind)]
    lm = LanguageModel(model(kind), tokenizer, batch_size=batch_size, chunk=chunk)
    assert lm.generate(PROMPTS, max_new_tokens=8) == wanted


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("chunk", [2048, 9])
def test_rolling_scores_every_token_of_whole_documents(kind, chunk, tokenizer):
    documents = [ids(90, 1), ids(1, 2), [], ids(55, 3)]
    lm = LanguageModel(model(kind), tokenizer, batch_size=3, chunk=chunk)
    wanted = [direct(model(kind), [256], d)[0] if d else 0.0 for d in documents]
    assert lm.rolling(documents, prefix=256) == pytest.approx(wanted, abs=CLOSE)
    assert lm.windowed == 0


def test_a_document_longer_than_any_training_context_is_one_long_forward_for_ours(tokenizer):
    """Row 38: no windows are cut."""
    document = ids(700, 5)
    lm = LanguageModel(model("titans"), tokenizer, chunk=64)
    assert lm.max_length is None
    assert lm.rolling([document], prefix=256) == pytest.approx([direct(model("titans"), [256], document)[0]], abs=1e-2)


def test_a_document_longer_than_the_limit_is_read_in_the_harness_windows_and_counted(tokenizer):
    lm_eval_utils = pytest.importorskip("lm_eval.utils")
    document = ids(3 * LIMIT + 11, 6)
    lm = LanguageModel(model("llama"), tokenizer)
    windows = map(lm_eval_utils.make_disjoint_window, lm_eval_utils.get_rolling_token_windows(document, 256, LIMIT, 1))
    wanted = sum(direct(model("llama"), *window)[0] for window in windows)
    assert lm.rolling([document, ids(5, 7)], prefix=256)[0] == pytest.approx(wanted, abs=CLOSE)
    assert lm.windowed == 1


@pytest.mark.parametrize("kind", ["comba", "neox", "mamba"])
def test_logits_that_would_not_fit_are_made_piece_by_piece(kind, tokenizer, monkeypatch):
    monkeypatch.setattr(language_model, "LOGITS", 3 * VOCAB * 4)
    wanted = [direct(model(kind), *pair)[0] for pair in PAIRS]
    found = LanguageModel(model(kind), tokenizer, batch_size=3).loglikelihoods(PAIRS)
    assert [total for total, _ in found] == pytest.approx(wanted, abs=CLOSE)


def test_pairs_that_differ_in_their_last_token_are_read_once(tokenizer):
    net, calls = model("retnet"), []
    hook = net.register_forward_pre_hook(lambda *a, **k: calls.append(k or a), with_kwargs=False)
    context = ids(30, 1)
    pairs = [(context, [5, 7]), (context, [5, 9]), (context, [6, 9])]
    found = LanguageModel(net, tokenizer, batch_size=1).loglikelihoods(pairs)
    hook.remove()
    assert len(calls) == 2
    assert [total for total, _ in found] == pytest.approx([direct(net, *pair)[0] for pair in pairs], abs=CLOSE)


def test_a_short_document_is_not_padded_to_a_long_one(tokenizer):
    net, read = model("retnet"), []
    hook = net.embed_tokens.register_forward_hook(lambda module, args, out: read.append(args[0].numel()))
    LanguageModel(net, tokenizer, batch_size=8).rolling([ids(2000, 1), ids(30, 2), ids(1200, 3), ids(40, 4)], prefix=256)
    hook.remove()
    assert read == [2 * 2000, 2 * 40]


# Stop strings.


class Scripted(torch.nn.Module):
    """Writes a text after each prompt, whatever the prompt says: token after token by the place in the document."""

    def __init__(self, text: bytes, prompt: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = LlamaConfig(vocab_size=VOCAB)
        self.text, self.prompt = [*text, 256], prompt

    def forward(self, input_ids, past_key_values=None, use_cache=None, attention_mask=None):
        from types import SimpleNamespace

        seen = 0 if past_key_values is None else past_key_values
        places = torch.arange(seen, seen + input_ids.shape[1]) + 1 - self.prompt
        wanted = torch.tensor(self.text)[places.clamp(0, len(self.text) - 1)]
        logits = torch.nn.functional.one_hot(wanted, VOCAB).float().expand(len(input_ids), -1, -1)
        return SimpleNamespace(logits=logits, past_key_values=seen + input_ids.shape[1])


@pytest.mark.parametrize(
    ("stop", "wanted"),
    [((), "one. two\n\nthree"), (("\n",), "one. two"), (("\n\n", ". "), "one"), (("absent",), "one. two\n\nthree"), (("o",), "")],
)
def test_generation_ends_before_the_first_stop_string_or_the_end_token(stop, wanted, tokenizer):
    lm = LanguageModel(Scripted(b"one. two\n\nthree", 4), tokenizer)
    assert lm.generate([ids(4, 1), ids(4, 2)], max_new_tokens=40, stop=stop) == [wanted, wanted]


def test_generation_stops_at_the_number_of_new_tokens(tokenizer):
    lm = LanguageModel(Scripted(b"abcdefgh", 4), tokenizer)
    assert lm.generate([ids(4, 1)], max_new_tokens=3) == ["abc"]


# Lengths.


def test_what_is_too_long_raises_with_the_sizes(tokenizer):
    """Row 37: no silent truncation, and the room for an answer is counted."""
    lm = LanguageModel(model("neox"), tokenizer, name="neox")
    with pytest.raises(ValueError, match=r"98 tokens, and neox has room for 97 \(its limit is 96\).*allow truncation"):
        lm.loglikelihoods([(ids(90, 1), ids(8, 2))])
    with pytest.raises(ValueError, match=r"prompt 0 with 10 new tokens: 87 tokens, .* room for 86"):
        lm.generate([ids(87, 1)], max_new_tokens=10)
    assert lm.truncated == 0


def test_what_just_fits_does_not_raise(tokenizer):
    lm = LanguageModel(model("neox"), tokenizer)
    lm.loglikelihoods([(ids(90, 1), ids(7, 2))])
    lm.generate([ids(86, 1)], max_new_tokens=10)
    assert lm.truncated == 0


def test_the_limit_can_be_given_instead_of_the_configuration_s(tokenizer):
    """Recurrent models of other packages name a limit that they do not have."""
    document = ids(150, 1)
    mamba = LanguageModel(model("mamba"), tokenizer, max_length=60)
    with pytest.raises(ValueError, match="room for 61"):
        mamba.loglikelihoods([(document, [1])])
    free = LanguageModel(model("llama"), tokenizer, max_length=0)
    assert free.max_length is None
    assert free.rolling([document], prefix=256) == pytest.approx([direct(model("llama"), [256], document)[0]], abs=CLOSE)
    with pytest.raises(ValueError, match="max_length is -1"):
        LanguageModel(model("llama"), tokenizer, max_length=-1)


def test_truncation_when_allowed_keeps_the_end_and_is_counted(tokenizer):
    lm = LanguageModel(model("neox"), tokenizer, allow_truncation=True)
    context, continuation = ids(200, 1), ids(8, 2)
    (found, _), _ = lm.loglikelihoods([(context, continuation), (ids(5, 1), [4])])
    assert found == pytest.approx(direct(model("neox"), context[-(LIMIT + 1 - 8) :], continuation)[0], abs=CLOSE)
    assert lm.truncated == 1
    assert lm.generate([context], max_new_tokens=6) == lm.generate([context[-(LIMIT - 6) :]], max_new_tokens=6)
    assert lm.truncated == 2


def test_an_answer_is_never_cut(tokenizer):
    lm = LanguageModel(model("neox"), tokenizer, allow_truncation=True)
    with pytest.raises(ValueError, match="room for 97"):
        lm.loglikelihoods([(ids(4, 1), ids(97, 2))])


# Errors.


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda lm: lm.loglikelihoods([([], [1])]), "the context of pair 0 has no token"),
        (lambda lm: lm.loglikelihoods([([1], [])]), "the continuation of pair 0 has no token"),
        (lambda lm: lm.loglikelihoods([([1, 300], [2])]), "token 300 is outside the model's vocabulary of 257"),
        (lambda lm: lm.rolling([[1, 300]], prefix=256), "token 300 is outside"),
        (lambda lm: lm.generate([[]], max_new_tokens=3), "prompt 0 has no token"),
        (lambda lm: lm.generate([[300]], max_new_tokens=3), "token 300 is outside"),
        (lambda lm: lm.generate([[1]], max_new_tokens=0), "max_new_tokens is 0"),
        (lambda lm: lm.generate([[1]], max_new_tokens=1, stop=("",)), "a stop string is empty"),
    ],
)
def test_bad_requests_say_what_is_wrong(call, words, tokenizer):
    with pytest.raises(ValueError, match=words):
        call(LanguageModel(model("retnet"), tokenizer))


@pytest.mark.parametrize(("options", "words"), [({"batch_size": 0}, "batch_size is 0"), ({"chunk": 0}, "chunk is 0")])
def test_sizes_below_one_are_refused(options, words, tokenizer):
    with pytest.raises(ValueError, match=words):
        LanguageModel(model("retnet"), tokenizer, **options)


def test_a_gpu_reads_many_rows_of_a_memory_that_does_not_grow(tokenizer, monkeypatch):
    sizes = {}
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(LanguageModel, "device", property(lambda self, name=device: torch.device(name)))
        sizes[device] = [LanguageModel(ours(kind), tokenizer).batch_size for kind in ("retnet", "comba", "attention")]
    assert sizes == {"cpu": [8, 8, 8], "cuda": [128, 128, 8]}


def test_logits_that_are_not_numbers_are_an_error(tokenizer):
    broken = ours("retnet")
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    lm = LanguageModel(broken, tokenizer)
    for call in (lambda: lm.loglikelihoods(PAIRS), lambda: lm.generate(PROMPTS, max_new_tokens=2)):
        with pytest.raises(ValueError, match="logits that are not numbers"):
            call()


def test_the_mode_of_the_model_is_as_before(tokenizer):
    net = ours("retnet").train()
    LanguageModel(net, tokenizer).loglikelihoods(PAIRS)
    assert net.training


# Opening.


def save(folder: Path, net) -> None:
    net.save_pretrained(folder)
    byte_tokenizer().save(folder)


def test_a_model_folder_opens_with_its_tokenizer(tmp_path, tokenizer):
    save(tmp_path, model("neox"))
    lm = LanguageModel.open(tmp_path)
    assert lm.loglikelihoods(PAIRS) == LanguageModel(model("neox"), tokenizer).loglikelihoods(PAIRS)
    assert (lm.name, lm.eos_id, lm.prefix_id, lm.max_length) == (str(tmp_path), 256, 256, LIMIT)
    assert lm.encode("añ") == [97, 0xC3, 0xB1]


def test_a_run_opens_at_its_newest_checkpoint_or_at_a_step(tmp_path, tokenizer):
    for step, kind in ((20, "retnet"), (100, "comba")):
        save(tmp_path / "checkpoints" / f"step-{step:08d}", model(kind))
    newest, older = LanguageModel.open(tmp_path), LanguageModel.open(tmp_path, step=20)
    assert (newest.model.config.mixer, older.model.config.mixer) == ("comba", "retnet")
    assert newest.name.endswith("(step-00000100)")
    assert newest.loglikelihoods(PAIRS) == LanguageModel(model("comba"), tokenizer).loglikelihoods(PAIRS)
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 5; it has 20, 100"):
        LanguageModel.open(tmp_path, step=5)


def test_a_run_of_the_trainer_opens(tmp_path):
    """The layout is what `proteus train` writes, not what these tests think it is."""
    from proteus_lm.run import Run, checkpoint_path

    folder = checkpoint_path(tmp_path, 7)
    save(folder, model("retnet"))
    (tmp_path / "recipe.yaml").write_text("")
    (folder / "trainer.json").write_text(json.dumps({"files": {}}))
    assert Run.open(tmp_path).checkpoint() == folder
    assert LanguageModel.open(tmp_path).name.endswith("(step-00000007)")


def test_a_checkpoint_whose_files_changed_is_refused(tmp_path):
    from proteus_lm.data.files import file_sha256
    from proteus_lm.run import checkpoint_path

    folder = checkpoint_path(tmp_path, 7)
    save(folder, model("retnet"))
    (tmp_path / "recipe.yaml").write_text("")
    files = {name: folder / name for name in ("config.json", "model.safetensors")}
    record = {"files": {n: p.stat().st_size for n, p in files.items()}, "sha256": {n: file_sha256(p) for n, p in files.items()}}
    (folder / "trainer.json").write_text(json.dumps(record))
    assert LanguageModel.open(folder).max_length == LanguageModel.open(tmp_path).max_length
    files["config.json"].write_text(files["config.json"].read_text().replace("retnet", "swlast"))
    for place in (folder, tmp_path):
        with pytest.raises(
            ValueError, match=r"config\.json is not what was written .*use another step of its run, or copy this one again"
        ):
            LanguageModel.open(place)


def test_dtype_is_that_of_the_weights(tmp_path):
    save(tmp_path, model("retnet"))
    lm = LanguageModel.open(tmp_path, dtype=torch.bfloat16)
    assert lm.model.lm_head.weight.dtype == torch.bfloat16
    # bf16 logits keep 8 bits: of sums near 200, some units
    assert [t for t, _ in lm.loglikelihoods(PAIRS)] == pytest.approx([direct(model("retnet"), *p)[0] for p in PAIRS], rel=0.1)


def test_weights_that_are_not_in_the_files_are_an_error(tmp_path):
    save(tmp_path, model("retnet"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"missing keys, such as layers\.2\."):
        LanguageModel.open(tmp_path)


@pytest.mark.parametrize("content", ["nothing", "checkpoints"])
def test_a_folder_that_holds_no_model_is_an_error(tmp_path, content):
    (tmp_path / content).mkdir()
    with pytest.raises(FileNotFoundError, match=r"neither a model .* nor a run with a checkpoint"):
        LanguageModel.open(tmp_path)


def test_a_step_of_something_that_has_none_is_an_error(tmp_path):
    save(tmp_path, model("retnet"))
    with pytest.raises(ValueError, match="one model and no run"):
        LanguageModel.open(tmp_path, step=3)
    with pytest.raises(ValueError, match="no run folder"):
        LanguageModel.open("some/model", step=3)


def test_a_name_without_the_hub_is_an_error_at_once(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match=r"some/model is not here.*HF_HUB_OFFLINE is set.*Give the folder"):
        LanguageModel.open("some/model")


# A million tokens.


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mixer", ["comba", "titans"])
def test_a_million_tokens_are_read_in_the_memory_of_a_few_thousand(mixer, tokenizer):
    """Peak growth of the process while a document is scored and gone on from: the same for 16,384 tokens and for 1,048,576."""
    config = ProteusConfig(mixer=mixer, vocab_size=VOCAB, hidden_size=32, num_heads=2, memory_blocks=4, memory_context=8192)
    lm = LanguageModel(ProteusForCausalLM(config).eval(), tokenizer, chunk=2048)
    short, long = (torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (2**14, 2**20))
    lm.rolling([short], prefix=256)  # what is allocated once
    small = _peak(lambda: lm.rolling([short], prefix=256))
    total: list[float] = []
    large = _peak(lambda: total.extend(lm.rolling([long], prefix=256)))
    assert len(total) == 1 and -10 * 2**20 < total[0] < -(2**20)
    # Token ids are held as tensors and lists, 8 bytes each, some copies of them; a cache of keys and values would hold 512 bytes a
    # token and layer here, the logits 1,028 bytes a token.
    assert large - small < 64 * 2**20
    assert _peak(lambda: lm.generate([long[: 2**17]], max_new_tokens=3)) - small < 64 * 2**20


def _peak(work) -> int:
    """Bytes by which the most memory of this process was above that before `work()`. Linux."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
