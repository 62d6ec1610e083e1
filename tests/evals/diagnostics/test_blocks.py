"""What a memory holds and does by block: equal to direct computation, for every mixer there is."""

import math

import pytest
import torch

from proteus_lm import ProteusCache
from proteus_lm.evals.diagnostics import effective_rank, profile_memory, unit_rows
from proteus_lm.evals.diagnostics.blocks import STEPS, without_block

from ...mixers.models import VOCABULARY, cases, make, options, scheduled_cases, tokens
from ..doubles import texts

POINTS = (8, 16, 24, 48)


def after(model, length, rows=2):
    """Rows of tokens, and the cache behind the first `length` of them."""
    ids, cache = tokens(rows, length + 1), ProteusCache()
    with torch.no_grad():
        model(input_ids=ids[:, :length], past_key_values=cache, use_cache=True)
    return ids, cache


@pytest.mark.parametrize("fields", cases())
def test_rows_of_a_blocks_units_hold_all_that_the_memorys_norm_counts(fields):
    model = make(fields)
    _, cache = after(model, 29)
    norms = model.memory_norms(cache)
    for layer, block in enumerate(model.layers):
        rows = unit_rows(block.mixer, cache.states[layer])
        if rows is None:
            assert (norms[layer] == 0).all()
            continue
        bounds = model.schedule.block_bounds(rows.shape[2])
        mine = torch.stack([rows[:, :, a:b].square().sum((1, 2, 3)).sqrt() for a, b in bounds], 1)
        assert torch.allclose(mine, norms[layer], rtol=1e-9, atol=1e-12)


def test_effective_rank_counts_directions():
    eye = torch.eye(4)
    assert effective_rank(eye).item() == pytest.approx(4)
    assert effective_rank(torch.ones(4, 6)).item() == pytest.approx(1)
    assert effective_rank(torch.zeros(3, 5)).item() == 0
    mixed = torch.diag(torch.tensor([3.0, 1.0]))  # shares 3/4 and 1/4
    assert effective_rank(mixed).item() == pytest.approx(math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)))
    assert effective_rank(torch.stack([eye, 7 * eye])).tolist() == pytest.approx([4, 4])  # scale does not count


@pytest.mark.parametrize("fields", scheduled_cases())
def test_locked_blocks_hold_nothing_are_not_written_and_not_read(fields):
    model = make(fields)
    profile = profile_memory(model, texts(60, 60, vocabulary=VOCABULARY), model.schedule, POINTS)
    for i, opened in enumerate(profile.open):
        for layer in profile.layers:
            for name in ("norm", "rank", "write"):
                values = getattr(profile, name)[i, layer]
                assert (values[opened:] == 0).all(), name
                assert (values[:opened] > 0).all(), name
            # The token that reads stands one further on and may open the next block, which is empty still.
            assert (profile.read[i, layer, opened + 1 :] == 0).all()
            assert (profile.read[i, layer, : opened - 1] > 0).all()


@pytest.mark.parametrize("mixer", ["comba", "swla", "titans"])
def test_norm_and_write_strength_are_those_of_the_states_themselves(mixer):
    model = make(options(mixer, memory_blocks=4, memory_context=24))
    data = texts(60, vocabulary=VOCABULARY)
    profile = profile_memory(model, data, model.schedule, POINTS, windows=1)
    ids = torch.from_numpy(data.document(0).astype("int64"))[None]
    changes = []
    for length in range(24 - STEPS, 25):
        cache = ProteusCache()
        with torch.no_grad():
            model(input_ids=ids[:, :length], past_key_values=cache, use_cache=True)
        changes.append(unit_rows(model.layers[1].mixer, cache.states[1]))
    assert profile.norm[2, 1] == pytest.approx(model.memory_norms(cache)[1, 0].numpy(), rel=1e-9)
    steps = [(b - a).square().sum((0, 1, 3)) for a, b in zip(changes, changes[1:])]
    for block, (a, b) in enumerate(model.schedule.block_bounds(len(steps[0]))):
        expected = sum(step[a:b].sum().sqrt().item() for step in steps) / STEPS
        assert profile.write[2, 1, block] == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("fields", scheduled_cases())
def test_a_state_without_a_block_differs_there_alone(fields):
    model = make(fields)
    _, cache = after(model, 32)  # at a boundary of every chunk here: nothing of Titans' memory waits to be written
    for layer, block in enumerate(model.layers):
        full = unit_rows(block.mixer, cache.states[layer])
        less = unit_rows(block.mixer, without_block(block.mixer, cache.states[layer], model.schedule, 1))
        a, b = model.schedule.block_bounds(full.shape[2])[1]
        assert (full[:, :, a:b].abs().amax((1, 2, 3)) > 0).all()
        if "titans_variant" not in fields or fields["titans_variant"] == "lmm":
            assert less[:, :, a:b].abs().max() < 1e-12
        kept = torch.ones(full.shape[2], dtype=torch.bool)
        kept[a:b] = False
        if fields.get("memory_depth", 2) <= 2:
            assert torch.allclose(full[:, :, kept], less[:, :, kept], rtol=1e-9, atol=1e-12)


def test_reading_an_emptied_memory_changes_the_output_by_the_share_that_is_reported():
    model = make(options("deltanet", memory_blocks=1, num_hidden_layers=1))
    data = texts(20, vocabulary=VOCABULARY)
    profile = profile_memory(model, data, model.schedule, (8,), windows=1)
    ids = torch.from_numpy(data.document(0).astype("int64"))[None]
    _, cache = ids, ProteusCache()
    outputs = []
    model.layers[0].mixer.register_forward_hook(lambda module, inputs, output: outputs.append(output[0]))
    with torch.no_grad():
        model(input_ids=ids[:, :8], past_key_values=cache, use_cache=True)
        empty = cache.copy()
        state = empty.states[0]
        empty.states = [state._replace(memory=torch.zeros_like(state.memory))]
        for each in (cache, empty):
            model(input_ids=ids[:, 8:9], past_key_values=each, use_cache=True)
    _, whole, less = outputs
    assert profile.read[0, 0, 0] == pytest.approx(((whole - less).norm() / whole.norm()).item(), rel=1e-9)


def test_attention_has_no_memory_to_look_at():
    model = make(options("attention"))
    profile = profile_memory(model, texts(60, vocabulary=VOCABULARY), model.schedule, POINTS)
    assert profile.layers == ()
    assert all((getattr(profile, name) == 0).all() for name in ("norm", "rank", "write", "read"))


@pytest.mark.parametrize("points", [(), (4,), (8, 12)])
def test_points_too_close_together_are_refused(points):
    model = make(options("deltanet"))
    with pytest.raises(ValueError, match=f"at least {STEPS} tokens apart"):
        profile_memory(model, texts(60, vocabulary=VOCABULARY), model.schedule, points)


def test_documents_too_short_for_the_profile_are_an_error():
    model = make(options("deltanet"))
    with pytest.raises(ValueError, match="no document holds 50 tokens"):
        profile_memory(model, texts(40, vocabulary=VOCABULARY), model.schedule, POINTS)
