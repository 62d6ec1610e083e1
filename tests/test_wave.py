"""Layers in a wave: the model is the same, whatever the number of pieces. Streams are tested on a GPU (train/test_graph.py)."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from proteus_lm.mixers import titans_mac
from proteus_lm.wave import run_wave
from tests.mixers.models import assert_near, cases, make, options, tokens

MAC = options("titans", titans_variant="mac")


def everything(model, ids, wave=0, **inputs):
    """Logits, loss and every gradient of a training forward."""
    model.train().zero_grad()
    model.wave = wave
    out = model(ids, labels=ids, **inputs)
    out.loss.backward()
    return [out.logits, out.loss, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.fixture
def pieces_run(monkeypatch):
    """Lengths of what the layers of a model are given."""
    found = []

    def watch(model):
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda _, given: found.append((given[0].shape[1], given[1].start)))
        return model

    return found, watch


@pytest.mark.parametrize("fields", cases())
def test_a_wave_changes_neither_logits_nor_loss_nor_a_gradient(fields):
    """23 tokens: no multiple of a chunk, of a segment or of the pieces, past every unlock."""
    model, ids = make({**fields, "num_hidden_layers": 2}), tokens(2, 23)
    wanted = everything(model, ids)
    for wave in (2, 3, 5):
        got = everything(model, ids, wave)
        for one, other in zip(got, wanted, strict=True):
            assert_near(one, other)


@pytest.mark.parametrize(("length", "wave", "lengths"), [(24, 3, [8, 8, 8]), (23, 5, [4, 5, 4, 5, 5]), (5, 9, [2, 3]), (1, 4, [1])])
def test_pieces_are_even_and_none_is_a_decoding_step(pieces_run, length, wave, lengths):
    found, watch = pieces_run
    model, ids = watch(make(MAC)), tokens(1, length)
    wanted = everything(model, ids)
    found.clear()
    for one, other in zip(everything(model, ids, wave), wanted, strict=True):
        assert_near(one, other)
    starts = [sum(lengths[:i]) or None for i in range(len(lengths))]
    assert found == [piece for piece in zip(lengths, starts) for _ in model.layers]


@pytest.mark.parametrize(
    "inputs",
    [
        {"use_cache": True},
        {"output_hidden_states": True},
        {"attention_mask": torch.ones(1, 16)},
        {"cu_seqlens": torch.tensor([0, 7, 16])},
    ],
    ids=lambda inputs: next(iter(inputs)),
)
def test_what_a_wave_does_not_take_runs_layer_by_layer(pieces_run, inputs):
    found, watch = pieces_run
    model, ids = watch(make(MAC)), tokens(1, 16)
    everything(model, ids, 4, **inputs)
    assert [length for length, _ in found] == [16, 16]
    found.clear()
    model.eval()(ids, use_cache=False)
    assert [length for length, _ in found] == [16, 16]


def test_the_wave_is_left_out_of_a_saved_model(tmp_path):
    model = make(MAC, torch.float32)
    model.wave = 4
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path).wave == 0


def test_compiled_layers_give_what_plain_ones_give_and_are_compiled_once(monkeypatch):
    """Streams are not compiled, the layers they carry are, and the work on MAC's segments: more pieces need no more code."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    segment = titans_mac.Pieces._make(torch.compile(piece, backend=counter) for piece in titans_mac.EAGER)
    monkeypatch.setattr(titans_mac, "_compiled", lambda: segment)
    model, graphs = make({**MAC, "num_hidden_layers": 1}), []
    compiled = torch.compile(model, backend=counter)
    for wave in (2, 3, 4):  # once for new lengths, then never again
        ids = tokens(2, 16 * wave)
        wanted = everything(model, ids)
        model.wave = wave
        loss = compiled(ids, labels=ids).loss
        got = torch.autograd.grad(loss, list(model.parameters()))
        for one, other in zip([loss, *got], wanted[1:], strict=True):
            assert_near(one, other)
        graphs.append(counter.frame_count)
    assert graphs[1] == graphs[2] > len(titans_mac.EAGER), f"{graphs} graphs for two, three and four pieces"


def test_a_state_that_is_left_behind_is_not_asked_for():
    """The last piece's: nobody goes on from it."""
    asked = []

    def layer(x, sequence, state, use_state):
        asked.append((sequence.start, state, use_state))
        return x + 1, len(asked)

    x = torch.arange(8.0).view(1, 8, 1)
    assert torch.equal(run_wave([layer, layer], x, make(MAC).schedule, 2), x + 2)
    assert asked == [(None, None, True), (None, None, True), (4, 1, False), (4, 2, False)]
