"""Models of other packages that are wrong in batches, in pieces or padded are seen, and read in a way that is right."""

import logging

import pytest
import torch
from transformers import (
    AutoTokenizer,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from proteus_lm.data.tokenizer import byte_tokenizer
from proteus_lm.evals.language_model import LanguageModel

SMALL = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2}
ATTENTION = SMALL | {"intermediate_size": 48, "num_attention_heads": 2}
# Sums of a few log p; the models' own rounding is 1e-5 at these weights, and what was wrong changed a score by 5e-2 to 9.9.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save(folder)
    return AutoTokenizer.from_pretrained(folder)


def make(kind: str, scale: float = 4, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    if kind == "rwkv":
        net = RwkvForCausalLM(RwkvConfig(**SMALL, attention_hidden_size=32, context_length=512))
    elif kind == "jamba":
        mixers = {"num_key_value_heads": 1, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
        net = JambaForCausalLM(JambaConfig(**ATTENTION, **mixers))
    elif kind == "mamba2":
        net = Mamba2ForCausalLM(Mamba2Config(**SMALL, state_size=8, num_heads=4, head_dim=16, n_groups=1, chunk_size=8))
    else:
        net = LlamaForCausalLM(LlamaConfig(**ATTENTION))
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return net.eval().to(dtype)


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(1, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PAIRS = [(ids(n, n), ids(3, 100 + n)) for n in (1, 5, 33, 70, 34, 2)]
PROMPTS = [ids(n, seed) for seed, n in enumerate((1, 5, 33, 70, 33, 2))]


def direct(net, context: list[int], continuation: list[int]) -> float:
    with torch.no_grad():
        logits = net(input_ids=torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].double()
    return float(logits.log_softmax(-1).gather(-1, torch.tensor(continuation)[:, None]).sum())


def greedy(net, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            chosen = int(net(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
        if chosen == 256:
            break
        tokens.append(chosen)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", ["rwkv", "jamba", "mamba2", "llama"])
@pytest.mark.parametrize(("batch_size", "chunk"), [(8, 2048), (6, 16), (3, 1)])
def test_neither_batch_nor_chunk_changes_a_score_or_a_text(kind, batch_size, chunk, tokenizer):
    net = make(kind)
    lm = LanguageModel(net, tokenizer, batch_size=batch_size, chunk=chunk)
    found = [total for total, _ in lm.loglikelihoods(PAIRS)]
    assert found == pytest.approx([direct(net, *pair) for pair in PAIRS], abs=CLOSE)
    rolled = lm.rolling([context + continuation for context, continuation in PAIRS], prefix=256)
    assert rolled == pytest.approx([direct(net, [256], context + continuation) for context, continuation in PAIRS], abs=CLOSE)
    assert lm.generate(PROMPTS, max_new_tokens=6) == [tokenizer.decode(greedy(net, prompt, 6)) for prompt in PROMPTS]


@pytest.mark.parametrize("scale", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_not_taken_for_a_fault(scale, dtype, tokenizer, caplog):
    for kind in ("llama", "mamba2"):
        assert all(LanguageModel(make(kind, scale, dtype), tokenizer)._abilities)
    assert not caplog.records


def test_a_state_lost_between_pieces_is_seen_where_it_matters_little(tokenizer):
    """As the weights are drawn it changes a log p by 3e-5: 300 roundings of this model, and a thousandth of a wrong context."""
    assert LanguageModel(make("jamba", 1), tokenizer)._abilities == (True, False, True, True)


def test_padding_that_only_single_tokens_let_in_is_seen_at_that_chunk(tokenizer):
    net = make("mamba2")
    assert [LanguageModel(net, tokenizer, chunk=chunk)._abilities.pads for chunk in (1, 2, 2048)] == [False, True, True]


def test_what_a_fault_costs_is_said_once(tokenizer, caplog):
    lm = LanguageModel(make("rwkv"), tokenizer, name="rwkv")
    with caplog.at_level(logging.WARNING):
        lm.loglikelihoods(PAIRS)
        lm.generate(PROMPTS, max_new_tokens=1)
    (record,) = caplog.records
    assert "rwkv does not give the same logits in batches" in record.message
    assert "one row at a time, which is slower" in record.message
    assert lm.rows == 1
