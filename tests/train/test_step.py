"""A micro-batch's forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from proteus_lm import ProteusConfig, ProteusForCausalLM
from proteus_lm.data.dataset import TokenDataset
from proteus_lm.data.loader import Loader
from proteus_lm.train.step import Piece, make_inputs
from tests.test_model import never_called


@pytest.mark.parametrize("positions", ["window", "document"])
def test_training_has_the_loss_and_gradients_of_whole_logits_and_never_makes_them(recipe, data, positions, monkeypatch):
    """fp32: sums in another order."""
    config = ProteusConfig(vocab_size=257, **recipe(mixer="comba").model, positions=positions)
    torch.manual_seed(0)
    model = ProteusForCausalLM(config).train()
    batch = Loader(TokenDataset(data, "train"), batch_size=4, context=32, seed=0).batch(0)
    given = make_inputs(batch, positions=positions, first=0, last=4)
    logits = model(given.ids, cu_seqlens=given.boundaries).logits
    right = cross_entropy(logits.flatten(0, 1), given.targets.flatten(), reduction="sum") / 100
    gradients = torch.autograd.grad(right, list(model.parameters()))
    never_called(model.lm_head, monkeypatch)
    loss = Piece(model, "fp32", torch.device("cpu"))(given, 100)
    assert loss.item() == pytest.approx(right.item(), rel=1e-6)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad - gradient).norm() <= 1e-5 * gradient.norm()
