"""One state protocol for every mixer: what a serving engine asks for, and the memory of a document in a file of its own."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from proteus_lm import ProteusCache, ProteusConfig
from proteus_lm.mixers.state import named_state, named_tensors
from tests.mixers.models import assert_near, cases, make, tensors, tokens

every = pytest.mark.parametrize("fields", cases())
STEPS = 23  # past every unlock (6, 12, 18), whole chunks of 4, a segment of 8; the last chunk is open


def inputs(rows: int, seed: int = 0, length: int = STEPS, dtype=torch.float64):
    """Hidden states (length, rows, hidden)."""
    return torch.randn(length, rows, 16, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def decode(mixer, schedule, xs, state, position):
    """Outputs and states of `step` over xs, from `position` (N,) on."""
    ys, states = [], []
    for t, x in enumerate(xs):
        y, state = mixer.step(x, state, position + t, schedule)
        ys.append(y)
        states.append(state)
    return torch.stack(ys), states


def assert_equal(one, two):
    """Two states are the same bit for bit, names, types and structure included."""
    one, two = named_tensors(one), named_tensors(two)
    assert list(one) == list(two)
    for name, x in one.items():
        assert x.dtype == two[name].dtype and torch.equal(x, two[name]), name


def parts(fields, dtype=torch.float64):
    """A mixer, its schedule, its configuration."""
    model = make(fields, dtype)
    return model.layers[0].mixer, model.schedule, model.config


@every
def test_steps_equal_one_call_over_the_whole_text(fields):
    mixer, schedule, _ = parts(fields)
    model, ids = make(fields), tokens(2, STEPS)
    xs, zero = inputs(2), torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        start = mixer.init_state(2, "cpu", torch.float64)
        stepped, states = decode(mixer, schedule, xs, start, zero)
        whole = model(ids, use_cache=True)
        assert stepped.shape == xs.shape and len(states) == STEPS
        # Layer by layer, as an engine does it.
        hidden, norm = model.embed_tokens(ids), model.norm
        layers = [(layer, layer.mixer.init_state(2, "cpu", torch.float64)) for layer in model.layers]
        for t in range(STEPS):
            x, now = hidden[:, t], []
            for layer, state in layers:
                y, state = layer.mixer.step(layer.mixer_norm(x), state, zero + t, schedule)
                x = x + y
                x = x + layer.mlp(layer.mlp_norm(x)) if layer.chain is None else layer.chain(x)
                now.append((layer, state))
            layers = now
            assert_near(model.lm_head(norm(x)), whole.logits[:, t])
        for (_, state), wanted in zip(layers, whole.past_key_values.states, strict=True):
            for one, two in zip(tensors(state), tensors(wanted), strict=True):
                assert_near(one, two)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"])
def test_shapes_and_types_are_known_from_the_configuration_alone(fields, dtype):
    mixer, schedule, config = parts(fields, dtype)
    before = torch.get_rng_state()
    kind = config.mixer_class
    types, start = kind.state_dtypes(config, dtype), kind.state_shapes(config, 3)
    assert torch.equal(torch.get_rng_state(), before)
    state = mixer.init_state(3, "cpu", dtype)
    assert start == {name: tuple(x.shape) for name, x in named_tensors(state).items()}
    assert types == {name: x.dtype for name, x in named_tensors(state).items()}
    with torch.no_grad():
        _, states = decode(mixer, schedule, inputs(3, dtype=dtype), state, torch.zeros(3, dtype=torch.int64))
    for length in (1, 6, STEPS):
        after = named_tensors(states[length - 1])
        assert kind.state_shapes(config, 3, length) == {name: tuple(x.shape) for name, x in after.items()}
        assert {name: x.dtype for name, x in after.items()} == types


@every
def test_the_numbers_in_the_shapes_are_those_of_the_formula(fields):
    config = ProteusConfig(**fields)
    shapes = config.mixer_class.state_shapes(config, 1, 9)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == config.mixer_class.state_size(config, 9)


@every
@pytest.mark.parametrize("at", [0, 1, 4, 5, 6, 7, 12, 17, 18, 20])
def test_rewinding_to_a_snapshot_gives_the_same_bits_again(fields, at):
    """Inside an open chunk (5, 7, 17), at its borders, at unlocks and beside them; as often as one likes."""
    mixer, schedule, _ = parts(fields, torch.float32)
    xs, zero = inputs(2, dtype=torch.float32), torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        start = mixer.init_state(2, "cpu", torch.float32)
        ys, states = decode(mixer, schedule, xs, start, zero)
        kept = start if at == 0 else states[at - 1]
        snapshot = mixer.snapshot(kept)
        draft = inputs(2, seed=7, dtype=torch.float32)[:5]  # one that is refused
        wrong, other = decode(mixer, schedule, draft, kept, zero + at)
        assert not torch.equal(wrong, ys[at : at + 5])
        for x in tensors(other[-1]):  # an engine may reuse its buffers: a snapshot has memory of its own
            x.fill_(-7)
        for state in (kept, mixer.restore(snapshot), mixer.restore(snapshot)):
            again, ends = decode(mixer, schedule, xs[at:], state, zero + at)
            assert torch.equal(again, ys[at:])
            assert_equal(ends[-1], states[-1])


@every
def test_a_snapshot_shares_no_memory_with_the_state_and_is_out_of_the_graph(fields):
    mixer, schedule, _ = parts(fields)
    x = inputs(2).requires_grad_()
    _, states = decode(mixer, schedule, x[:5], mixer.init_state(2, "cpu", torch.float64), torch.zeros(2, dtype=torch.int64))
    snapshot = mixer.snapshot(states[-1])
    state = named_tensors(states[-1])
    assert list(snapshot) == list(state)
    for name, copy in snapshot.items():
        assert torch.equal(copy, state[name]) and not copy.requires_grad and copy.is_contiguous()
        assert not copy.numel() or copy.untyped_storage().data_ptr() != state[name].untyped_storage().data_ptr()
    restored = named_tensors(mixer.restore(snapshot))
    for name, copy in snapshot.items():
        copy.fill_(3)
        assert torch.equal(restored[name], state[name])


@every
def test_rows_are_snapped_and_put_into_another_batch(fields):
    mixer, schedule, _ = parts(fields)
    xs, zero = inputs(3), torch.zeros(3, dtype=torch.int64)
    with torch.no_grad():
        ys, states = decode(mixer, schedule, xs, mixer.init_state(3, "cpu", torch.float64), zero)
        one = mixer.restore(mixer.snapshot(states[6], torch.tensor([2])))
        batch = mixer.put_rows(states[10], torch.tensor([1]), one)  # a batch whose rows stand at 11, 7 and 11
        position = torch.tensor([11, 7, 11])
        order = [xs[11:16], xs[7:12]]
        mixed = torch.stack((order[0][:, 0], order[1][:, 2], order[0][:, 2]), 1)
        again, _ = decode(mixer, schedule, mixed, batch, position)
        assert_near(again[:, 0], ys[11:16, 0])
        assert_near(again[:, 1], ys[7:12, 2])
        assert_near(again[:, 2], ys[11:16, 2])


@every
def test_reset_puts_the_initial_memory_back_into_rows_and_touches_no_other(fields):
    mixer, schedule, config = parts(fields)
    xs, zero = inputs(3), torch.zeros(3, dtype=torch.int64)
    rows = torch.tensor([2, 0])
    with torch.no_grad():
        ys, states = decode(mixer, schedule, xs, mixer.init_state(3, "cpu", torch.float64), zero)
        fresh = mixer.reset(states[9], rows)
        start = named_tensors(mixer.init_state(2, "cpu", torch.float64))
        for name, x in named_tensors(fresh).items():
            assert torch.equal(x[1], named_tensors(states[9])[name][1]), name
            if name not in mixer.growing:
                assert torch.equal(x[rows], start[name]), name
        if "chunk_size" in config.mixer_class.fields:  # a learned initial memory is nowhere all zero
            weights = {n: x for n, x in named_tensors(fresh).items() if ".weights." in n or n.startswith("weights.")}
            assert weights and all(x[rows].abs().max() > 0 for x in weights.values())
        position = torch.tensor([0, 10, 0])
        again, _ = decode(mixer, schedule, torch.stack((xs[:8, 0], xs[10:18, 1], xs[:8, 2]), 1), fresh, position)
        assert_near(again[:, 0], ys[:8, 0])
        assert_near(again[:, 1], ys[10:18, 1])
        assert_near(again[:, 2], ys[:8, 2])


@every
def test_a_snapshot_of_another_model_is_refused(fields):
    mixer, _, _ = parts(fields)
    snapshot = mixer.snapshot(mixer.init_state(2, "cpu", torch.float64))
    other, _, _ = parts({**fields, "num_heads": 4})
    with pytest.raises(ValueError, match="restore a snapshot of the same model"):
        other.restore(snapshot)
    first = next(iter(snapshot))
    with pytest.raises(ValueError, match="the state of this mixer has"):
        mixer.restore({n: x for n, x in snapshot.items() if n != first})


def test_names_are_paths_and_find_their_way_back():
    for case in cases():
        state = make(case.values[0]).layers[0].mixer.init_state(1, "cpu", torch.float64)
        assert_equal(named_state(named_tensors(state), state), state)
    titans, _, _ = parts({"mixer": "titans", "hidden_size": 16, "num_heads": 2, "chunk_size": 4})
    assert list(named_tensors(titans.init_state(1, "cpu", torch.float64)))[:3] == ["conv", "memory.weights.0", "memory.weights.1"]


# The memory of a document in a file.


@every
def test_one_documents_memory_is_saved_and_loaded_on_its_own(fields, tmp_path):
    model, ids = make(fields, torch.float32), tokens(3, 9)
    mask = torch.tensor([[0] * 4 + [1] * 5, [1] * 9, [0] * 2 + [1] * 7])
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        one = cache.reorder(torch.tensor([2]))
        one.save(tmp_path / "document.safetensors", model)
        loaded = ProteusCache.load(tmp_path / "document.safetensors", model)
        assert loaded.position.tolist() == [7]
        for part in (ids[:1, :1], ids[:1, :6]):
            assert torch.equal(model(part, past_key_values=one).logits, model(part, past_key_values=loaded).logits)


@every
def test_a_memory_is_bound_to_the_weights_that_made_it_and_both_hashes_are_named(fields, tmp_path):
    model, path = make(fields, torch.float32), tmp_path / "document.safetensors"
    model(tokens(1, 5), use_cache=True).past_key_values.save(path, model)
    same = make(fields, torch.float32)
    assert same.fingerprint() == model.fingerprint() and ProteusCache.load(path, same).get_seq_length() == 5
    with torch.no_grad():
        weight = same.lm_head.weight
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))  # one bit of one weight
    for other in (same, make(fields, torch.float64), make({**fields, "norm_eps": 1e-5}, torch.float32)):
        with pytest.raises(ValueError) as error:
            ProteusCache.load(path, other)
        assert model.fingerprint() in str(error.value) and other.fingerprint() in str(error.value)


def test_a_file_that_is_no_saved_memory_or_lacks_a_tensor_is_refused(tmp_path):
    model, path = make(cases()[0].values[0], torch.float32), tmp_path / "document.safetensors"
    save_file({"position": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="no saved ProteusCache"):
        ProteusCache.load(path, model)
    model(tokens(1, 5), use_cache=True).past_key_values.save(path, model)
    about = {"model": model.fingerprint(), "seen": "5", "unlocks": "[0]"}
    held = load_file(path)
    held.pop(next(name for name in held if name != "position"))
    save_file(held, path, metadata=about)
    with pytest.raises(ValueError, match="the state of this mixer has"):
        ProteusCache.load(path, model)
