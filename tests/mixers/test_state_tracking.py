"""State tracking: parity and permutations of five for Titans of depth 1 to 4 and the linear rules (docs/state-tracking.md).

Titans' Theorem 4.1 says that its memory can track states which linear recurrences cannot. One layer, so that nothing but the memory
carries the state; an inner chunk of one token, as the theorem has it; trained on short texts, and asked on texts twice as long too,
where a circuit learned for the short ones does not help.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import cross_entropy

from proteus_lm import ProteusConfig, ProteusForCausalLM
from proteus_lm.data.synthetic import PARITY_VOCABULARY, Task, accuracy, parity, permutations

DEPTHS = (1, 2, 3, 4)
LINEAR = ("comba", "deltanet", "gated_deltanet", "retnet", "swla")
MODELS = {name: {"mixer": name} for name in LINEAR}
MODELS |= {f"titans-{depth}": {"mixer": "titans", "memory_depth": depth, "chunk_size": 1} for depth in DEPTHS}


def learn(task: Callable[[int, int, int], Task], vocabulary: int, length: int, steps: int, width: int, batch: int, **fields):
    """Accuracy on 256 new texts at the positions trained on, and from `length` to twice that (4,096 answers or half: ± 0.01)."""
    torch.manual_seed(0)
    shape = {"hidden_size": width, "num_heads": 2, "num_hidden_layers": 1, "intermediate_size": 2 * width}
    model = ProteusForCausalLM(ProteusConfig(vocab_size=vocabulary, memory_context=length, **shape, **fields)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        tokens, targets = task(batch, length, step)
        optimizer.zero_grad()
        cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    tokens, targets = task(256, 2 * length, 10**6)
    with torch.no_grad():
        logits = model.eval()(tokens).logits
    return accuracy(logits[:, :length], targets[:, :length]), accuracy(logits[:, length:], targets[:, length:])


def learn_parity(name: str) -> tuple[float, float]:
    """After 600 batches of 32 texts of 16 bits; chance is 0.5."""
    return learn(parity, PARITY_VOCABULARY, 16, 600, 32, 32, **MODELS[name])


def learn_permutations(name: str) -> tuple[float, float]:
    """After 600 batches of 64 texts of 8 permutations of five; chance is 1 / 120."""
    return learn(permutations, 120, 8, 600, 64, 64, **MODELS[name])


every = pytest.mark.parametrize("name", MODELS)
pytestmark = pytest.mark.timeout(3600)  # minutes on an idle core, for the deep memories


@pytest.mark.slow
@every
def test_parity_is_learned_and_linear_rules_do_not_carry_it_further(name, record_property):
    short, longer = learn_parity(name)
    record_property("accuracy", (short, longer))
    assert short >= 0.7, f"{name}: {short:.3f} where it was trained, chance 0.5, wanted 0.7"  # the worst measured: 0.76
    if name in LINEAR:  # measured: 0.50 to 0.58. Their transitions have no negative eigenvalue, so none can flip a bit for ever
        assert longer <= 0.65, f"{name}: {longer:.3f} on texts twice as long: a linear rule tracks parity after all; mend the page"


@pytest.mark.slow
def test_a_titans_memory_of_two_layers_carries_parity_further_than_it_was_trained():
    short, longer = learn_parity("titans-2")
    assert short >= 0.9, f"{short:.3f} where it was trained, wanted 0.9"  # measured: 0.97
    assert longer >= 0.7, f"{longer:.3f} on texts twice as long, chance 0.5, wanted 0.7"  # measured: 0.80


@pytest.mark.slow
@every
def test_no_model_of_this_size_tracks_permutations_of_five(name, record_property):
    """The first answer is the first token; who knows no product gets that one, and 1 / 120 of the others: 0.132 of all."""
    short, longer = learn_permutations(name)
    record_property("accuracy", (short, longer))
    assert short >= 0.12, f"{name}: {short:.3f}: it has not even learned to give its first token back"
    assert short <= 0.2, f"{name}: {short:.3f} where it was trained, {longer:.3f} beyond: it tracks them after all; mend the page"
