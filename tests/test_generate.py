from types import SimpleNamespace

import numpy as np
import pytest
import torch

from proteus_lm.config import ProteusConfig
from proteus_lm.data.tokenizer import load_tokenizer
from proteus_lm.generate import Sampling, generate
from proteus_lm.model import ProteusForCausalLM

BYTES = load_tokenizer("byte")


@pytest.fixture(scope="module")
def model() -> ProteusForCausalLM:
    torch.manual_seed(0)
    config = ProteusConfig(hidden_size=32, num_heads=2, memory_expansion=2, chunk_size=8, memory_blocks=4, memory_context=32)
    made = ProteusForCausalLM(config).eval()
    with torch.no_grad():
        made.lm_head.weight.mul_(30)  # far from uniform, so that greedy, sampling and beams differ
    return made


def test_greedy_text_is_the_likeliest_token_each_time(model):
    ids = torch.from_numpy(BYTES.encode("The memory"))[None]
    expected = []
    with torch.no_grad():
        for _ in range(12):  # without a cache, the whole text each time
            token = int(model(input_ids=ids).logits[0, -1].argmax())
            if token == BYTES.eos_id:
                break
            expected.append(token)
            ids = torch.cat((ids, torch.tensor([[token]])), 1)
    assert generate(model, BYTES, "The memory", Sampling(12, temperature=0)) == BYTES.decode(expected)


def test_the_same_seed_gives_the_same_text_and_another_seed_another(model):
    first, again, other = (generate(model, BYTES, "a", Sampling(24, temperature=1.0, seed=s)) for s in (3, 3, 4))
    assert first == again != other


def test_drawing_text_leaves_the_random_state_as_it_was(model):
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    generate(model, BYTES, "a", Sampling(4))
    assert torch.equal(torch.rand(3), expected)


def test_one_candidate_is_greedy(model):
    greedy = generate(model, BYTES, "abc", Sampling(12, temperature=0))
    assert generate(model, BYTES, "abc", Sampling(12, temperature=5.0, top_k=1)) == greedy
    assert generate(model, BYTES, "abc", Sampling(12, temperature=5.0, top_p=1e-6)) == greedy
    assert generate(model, BYTES, "abc", Sampling(12, temperature=5.0)) != greedy


def test_beams_find_a_text_at_least_as_likely_as_greedy(model):
    def score(text: str) -> float:
        ids = torch.from_numpy(np.concatenate((BYTES.encode("abc"), BYTES.encode(text))))[None]
        with torch.no_grad():
            logs = model(input_ids=ids[:, :-1]).logits.log_softmax(-1)
        return logs[0, 2:].gather(-1, ids[0, 3:, None]).sum().item()

    ascii_only = SimpleNamespace(encode=BYTES.encode, eos_id=BYTES.eos_id, decode=lambda ids, **_: bytes(ids).decode("latin-1"))
    restricted = ProteusForCausalLM(model.config).eval()
    restricted.load_state_dict(model.state_dict())
    forward = restricted.forward

    def letters_only(*args, **keywords):  # so that text and tokens are one to one
        out = forward(*args, **keywords)
        out.logits[..., 128:] = -1e9
        return out

    restricted.forward = letters_only
    greedy = generate(restricted, ascii_only, "abc", Sampling(6, temperature=0))
    beams = generate(restricted, ascii_only, "abc", Sampling(6, temperature=0, num_beams=4))
    assert score(beams) >= score(greedy) - 1e-4


def test_the_end_token_stops_the_text_and_is_not_part_of_it(model):
    ending = ProteusForCausalLM(model.config).eval()
    ending.load_state_dict(model.state_dict())
    forward = ending.forward

    def always_end(*args, **keywords):
        out = forward(*args, **keywords)
        out.logits[..., BYTES.eos_id] = 1e9
        return out

    ending.forward = always_end
    assert generate(ending, BYTES, "abc", Sampling(50)) == ""


def test_a_prompt_with_no_tokens_is_a_clear_error(model):
    with pytest.raises(ValueError, match="prompt '' gives no token; give at least one character"):
        generate(model, BYTES, "", Sampling())


def test_a_prompt_outside_the_models_vocabulary_is_a_clear_error(model):
    wide = SimpleNamespace(encode=lambda text: np.array([5, 300]), decode=BYTES.decode, eos_id=0)
    with pytest.raises(ValueError, match="token 300 is outside the model's vocabulary of 257"):
        generate(model, wide, "x", Sampling())


@pytest.mark.parametrize(
    "bad",
    [{"max_new_tokens": 0}, {"temperature": -0.1}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}, {"seed": -1}, {"num_beams": 0}],
)
def test_sampling_values_outside_their_rule_are_refused_by_name(bad):
    (name, value), *_ = bad.items()
    with pytest.raises(ValueError, match=f"{name} is {value}; it must be"):
        Sampling(**bad)


def test_beams_with_a_temperature_are_refused_and_not_ignored():
    with pytest.raises(ValueError, match="give temperature 0"):
        Sampling(num_beams=3, temperature=0.8)
