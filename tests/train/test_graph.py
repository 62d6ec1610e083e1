"""Training by a replayed CUDA graph: where it is refused, and on a GPU that it gives the losses of plain training."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from proteus_lm import ProteusConfig, ProteusForCausalLM
from proteus_lm.train.graph import GraphedPiece
from proteus_lm.train.loop import train
from proteus_lm.train.recipe import RecipeError
from proteus_lm.train.setup import check_graph
from proteus_lm.train.step import Inputs, Piece

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "changes", "model", "named"),
    [
        (torch.device("cpu"), {}, {"positions": "window"}, "on cpu"),
        (CUDA, {}, {}, "packed documents"),
        (CUDA, {}, {"positions": "document"}, "packed documents"),
        (CUDA, {"gradient_checkpointing": True}, {"positions": "window"}, "gradient_checkpointing"),
    ],
)
def test_a_graph_is_refused_where_it_cannot_be_captured(recipe, device, changes, model, named):
    plain = recipe(mixer="titans")
    for on, raises in ((True, True), (False, False)):
        asked = dataclasses.replace(
            plain, model={**plain.model, **model}, train=dataclasses.replace(plain.train, cuda_graph=on, **changes)
        )
        if raises:
            with pytest.raises(RecipeError, match=f"{named}.*train.cuda_graph=false"):
                check_graph(asked, device)
        else:
            check_graph(asked, device)


def test_replayed_micro_batches_give_the_gradients_of_plain_ones():
    """With a replay that runs the captured work again, as a graph does."""
    torch.manual_seed(0)
    model = ProteusForCausalLM(ProteusConfig(mixer="titans", hidden_size=16, num_heads=2, num_hidden_layers=1, vocab_size=20))
    parameters, device = list(model.parameters()), torch.device("cpu")
    batches = [torch.randint(0, 20, (2, 2, 9)) for _ in range(3)]
    found = {}
    for name, piece in (
        ("plain", Piece(model, "fp32", device)),
        ("graphed", GraphedPiece(model, "fp32", device, parameters, lambda work: work)),
    ):
        model.zero_grad(set_to_none=True)
        found[name] = []
        for step in batches:
            losses = [piece(Inputs(ids[:, :-1], ids[:, 1:], None), 32) for ids in step]
            found[name].append([*losses, *(p.grad.clone() for p in parameters if p.grad is not None)])
            model.zero_grad(set_to_none=False)
    for plain, graphed in zip(found["plain"], found["graphed"]):
        for a, b in zip(plain, graphed, strict=True):
            assert torch.equal(a, b)
    with pytest.raises(ValueError, match="captured for"):
        piece(Inputs(batches[0][0, :1, :-1], batches[0][0, :1, 1:], None), 32)
    with pytest.raises(ValueError, match="packed documents"):
        piece(Inputs(batches[0][0, :, :-1], batches[0][0, :, 1:], torch.tensor([0, 8])), 32)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("variant", ["lmm", "mac"])
def test_graphed_training_gives_the_losses_of_plain_training(recipe, tmp_path, variant, compiled):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    plain = recipe(mixer="titans")
    fields = {"titans_variant": variant, "positions": "window", **({"segment_length": 16} if variant == "mac" else {})}
    losses = []
    for graphed in (False, True):
        options = dataclasses.replace(plain.train, device="cuda", cuda_graph=graphed, compile=compiled and graphed)
        run = train(dataclasses.replace(plain, model={**plain.model, **fields}, train=options), tmp_path / str(graphed))
        losses.append([r["loss"] for r in run.metrics()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # tf32 products and another order of sums, over the run's steps
