"""The forms of Titans (LMM, MAC, MAG, MAL, persistent tokens) against their equations, one token at a time, and their traps."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, silu

from proteus_lm import ProteusConfig, ProteusForCausalLM
from proteus_lm.mixers import AttentionMixer, titans_forms, titans_mac
from proteus_lm.mixers.rotary import rotary_angles, rotate
from proteus_lm.mixers.segment import segments
from proteus_lm.sequence import TokenSequence
from tests.mixers.models import CONTEXT, assert_near, make, options, tensors, tokens

T = 19  # two segments of 8 and a part of one, unlocks at 6, 12, 18
SCHEDULED = {"memory_blocks": 4, "memory_context": CONTEXT}
FORMS = sorted(titans_forms)
forms = pytest.mark.parametrize("form", FORMS)


def inputs(rows=1, length=T):
    return torch.randn(rows, length, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def mixer_of(form, **changes):
    fields = options("titans", titans_variant=form, **changes)
    return make(fields).layers[0].mixer.requires_grad_(False), ProteusConfig(**fields)


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


class Memory:
    """A memory of two layers of one row and head, written by torch's own gradient; the open units are given at each token."""

    def __init__(self, weights):
        self.weights, self.momentum, self.frozen = weights, [torch.zeros_like(w) for w in weights], weights

    @staticmethod
    def masks(open_units, weights):
        units = torch.arange(weights[0].shape[1]) < open_units
        return [units[None, :], units[:, None]]

    @classmethod
    def answer(cls, weights, x, open_units):
        first, last = (w * m for w, m in zip(weights, cls.masks(open_units, weights)))
        return gelu(x @ first, approximate="tanh") @ last

    def write(self, k, v, theta, alpha, eta, open_units):
        leaves = [w.clone().requires_grad_() for w in self.frozen]
        loss = 0.5 * (self.answer(leaves, k, open_units) - v).square().sum()
        gradients = torch.autograd.grad(loss, leaves)
        masks = self.masks(open_units, self.weights)
        steps = [eta * s - theta * g for s, g in zip(self.momentum, gradients)]
        self.momentum = [torch.where(m, new, old) for m, new, old in zip(masks, steps, self.momentum)]
        moved = [(1 - alpha) * w + s for w, s in zip(self.weights, self.momentum)]
        self.weights = [torch.where(m, new, old) for m, new, old in zip(masks, moved, self.weights)]


def remembered(mixer, x, config, persistent=None):
    """The reads (T, H, D) of one row x (T, width) behind the persistent tokens, and every head's weights before each token."""
    count = 0 if persistent is None else len(persistent)
    x = x if persistent is None else torch.cat((persistent, x))
    parts, _ = mixer.projection(x[None], TokenSequence(config.schedule, 1, len(x)))
    q, k, v = (unit(part[0]) for part in parts)
    gates = [g[0] for g in mixer._step_sizes(x[None])]
    reads, before = [], []
    memories = [Memory([w[head] for w in mixer.initial]) for head in range(config.num_heads)]
    for t in range(len(x)):
        position = t - count
        if position >= 0:
            before.append([memory.weights for memory in memories])
        if position == -count or (position >= 0 and position % config.chunk_size == 0):
            for memory in memories:
                memory.frozen = memory.weights
        opened = config.schedule.active(mixer.units, position)
        for head, memory in enumerate(memories):
            memory.write(k[t, head], v[t, head], *(g[t, head] for g in gates), opened)
        read = [memory.answer(memory.weights, q[t, head], opened) for head, memory in enumerate(memories)]
        reads.append(torch.stack(read))
    before.append([memory.weights for memory in memories])
    return torch.stack(reads[count:]), before


def attended(attention, x, persistent, context=None, start=0, window=None):
    """Heads side by side (T, H D) of tokens x (T, hidden) from position `start`, each beside what it recalled, in `context`."""
    heads, dim, length = attention.heads, attention.dim, len(x)
    angles = rotary_angles(torch.arange(start, start + length)[None], dim, x.dtype)[:, :, None]

    def turned(y):
        return rotate(y[None], (angles.cos(), angles.sin()))[0]

    def project(y):
        return attention.linear(y).unflatten(-1, (3, heads, dim)).unbind(1)

    q, k, v = project(x)
    scores = [torch.einsum("ihd,jhd->hij", turned(q), turned(k))]
    apart = torch.arange(length)[:, None] - torch.arange(length)
    sees = (apart >= 0) & (apart < (window or length))
    scores[0] = scores[0].masked_fill(~sees, -torch.inf)
    values = [v]
    if context is not None:
        _, k, v = project(context)
        scores.append(torch.einsum("ihd,jhd->hij", turned(q), turned(k)).masked_fill(~sees, -torch.inf))
        values.append(v)
    if persistent is not None:
        _, k, v = project(persistent)
        scores.append(torch.einsum("ihd,jhd->hij", q, k))
        values.append(v)
    weights = torch.softmax(torch.cat(scores, -1) / dim**0.5, -1)
    return torch.einsum("hij,jhd->ihd", weights, torch.cat(values)).flatten(1)


def combined(mixer, y, m, kind="sigmoid_gate"):
    a, b = mixer.combine.attended(y), mixer.combine.remembered(m.flatten(1))
    return mixer.attention.out({"sigmoid_gate": a * torch.sigmoid(b), "silu": a * silu(b), "add": a + b}[kind])


def by_hand(form, mixer, x, config):
    """One row x (T, hidden) -> (T, hidden)."""
    persistent = mixer.persistent
    if form == "mac":
        return mac_by_hand(mixer, x, config)
    m, _ = remembered(mixer, x, config, persistent)
    if form == "mag":
        return combined(mixer, attended(mixer.attention, x, persistent, window=config.window), m, config.mag_combine)
    m = mixer.output(m[None], x[None])[0]
    if form == "lmm":
        return m
    z = mixer.attention_norm(x + m)
    return m + mixer.attention.out(attended(mixer.attention, z, persistent, window=config.window))


def mac_by_hand(mixer, x, config):
    (q,), _ = mixer.query(x[None], TokenSequence(config.schedule, 1, len(x)))
    q, ys = unit(q[0]), x.new_zeros(0, config.num_heads * config.head_dim)
    for start in range(0, len(x), config.segment_length):
        end = min(start + config.segment_length, len(x))
        before = [[w[h] for w in mixer.initial] for h in range(config.num_heads)]
        if start:
            before = remembered(mixer, ys, config)[1][start]
        recalled = []
        for t in range(start, end):
            opened = config.schedule.active(mixer.units, t)
            recalled.append(torch.cat([Memory.answer(w, q[t, h], opened) for h, w in enumerate(before)]))
        context = mixer.recall_norm(mixer.recall(torch.stack(recalled)))
        ys = torch.cat((ys, attended(mixer.attention, x[start:end], mixer.persistent, context, start)))
    return combined(mixer, ys, remembered(mixer, ys, config)[0])


CHANGES = [{}, {"persistent_tokens": 3}, SCHEDULED, {**SCHEDULED, "persistent_tokens": 4}]


@pytest.mark.parametrize("changes", CHANGES, ids=["plain", "persistent", "scheduled", "both"])
@forms
def test_a_form_is_its_equations(form, changes):
    mixer, config = mixer_of(form, **changes)
    x = inputs()
    y, _ = mixer(x, TokenSequence(config.schedule, 1, T))
    assert_near(y[0], by_hand(form, mixer, x[0], config))


@pytest.mark.parametrize("kind", ["sigmoid_gate", "silu", "add"])
def test_mag_joins_attention_and_memory_as_configured(kind):
    mixer, config = mixer_of("mag", mag_combine=kind, persistent_tokens=2)
    y, _ = mixer(inputs(), TokenSequence(config.schedule, 1, T))
    assert_near(y[0], by_hand("mag", mixer, inputs()[0], config))


# TTT.


def test_without_momentum_and_forgetting_the_memory_is_ttt():
    """W_t = W_(last boundary) - sum of theta_i grad_i since, the gradients taken there (TTT, eq 5 of its dual form)."""
    mixer, config = mixer_of("lmm", use_momentum=False, use_forgetting=False)
    assert mixer.alpha is None and mixer.eta is None
    x = inputs()
    parts, _ = mixer.projection(x, TokenSequence(config.schedule, 1, T))
    q, k, v = (unit(part[0]) for part in parts)
    theta = mixer.step_bound(config) / config.chunk_size * torch.sigmoid(mixer.theta(x))[0]
    reads = torch.zeros(T, 2, 8, dtype=torch.float64)
    for head in range(2):
        boundary = [w[head] for w in mixer.initial]
        for t in range(T):
            if t % config.chunk_size == 0:
                gradients, weights = [torch.zeros_like(w) for w in boundary], boundary
            leaves = [w.clone().requires_grad_() for w in boundary]
            error = gelu(k[t, head] @ leaves[0], approximate="tanh") @ leaves[1] - v[t, head]
            new = torch.autograd.grad(0.5 * error.square().sum(), leaves)
            gradients = [g + theta[t, head] * n for g, n in zip(gradients, new)]
            weights = [w - g for w, g in zip(boundary, gradients)]
            reads[t, head] = gelu(q[t, head] @ weights[0], approximate="tanh") @ weights[1]
            if (t + 1) % config.chunk_size == 0:
                boundary = weights
    y, _ = mixer(x, TokenSequence(config.schedule, 1, T))
    assert_near(y, mixer.output(reads[None], x))


# Causality traps (spec/deep.md 1.6, 5.1).


@pytest.mark.parametrize("changes", [{}, {**SCHEDULED, "persistent_tokens": 3}], ids=["plain", "scheduled"])
@forms
def test_no_token_changes_a_bit_of_an_earlier_logit(form, changes):
    model, ids = make(options("titans", titans_variant=form, **changes)), tokens(1, 27)
    with torch.no_grad():
        base = model(ids).logits
        for at in range(1, 27):  # all chunk (4), segment (8) and unlock (6) borders, one before and one behind them
            changed = ids.clone()
            changed[:, at:] = (ids[:, at:] + 1) % 31
            logits = model(changed).logits
            assert torch.equal(base[:, :at], logits[:, :at]), f"token {at} leaks backwards"
            changed = ids.clone()
            changed[:, at] = (ids[:, at] + 1) % 31
            logits = model(changed).logits
            assert torch.equal(base[:, :at], logits[:, :at]), f"token {at} alone leaks backwards"


@forms
def test_the_first_segment_reaches_the_last_token_through_the_memory_alone(form):
    fields = options("titans", titans_variant=form, num_hidden_layers=1, use_forgetting=False)  # it depends on the tokens too
    if form in ("mag", "mal"):
        fields["window"] = 3
    ids = tokens(1, 32)
    changed = ids.clone()
    changed[:, :8] = (ids[:, :8] + 1) % 31

    def difference(model):
        with torch.no_grad():
            return (model(ids).logits - model(changed).logits)[:, -1].abs().max()

    model = make(fields)
    assert difference(model) > 1e-9
    mixer = model.layers[0].mixer
    with torch.no_grad():
        mixer.theta.weight.zero_()
        mixer.theta.bias.fill_(-1e9)  # nothing is written
    assert difference(model) == 0


def test_the_memory_of_mac_is_written_from_the_output_of_attention_alone():
    ids, other = tokens(1, T), tokens(1, T, seed=2)
    for forgetting in (False, True):
        model = make(options("titans", titans_variant="mac", num_hidden_layers=1, use_forgetting=forgetting, persistent_tokens=2))
        mixer = model.layers[0].mixer

        def weights(tokens, model=model):
            with torch.no_grad():
                return tensors(model(tokens, use_cache=True).past_key_values.states[0].memory.memory.weights)

        assert not torch.equal(weights(ids)[0], weights(other)[0])
        with torch.no_grad():
            mixer.attention.linear.weight[-16:].zero_()  # the values: attention gives zero
        for one, two, start in zip(weights(ids), weights(other), mixer.initial):
            assert torch.equal(one, two)
            assert torch.equal(one[0], start) != forgetting  # forgetting goes on, whatever the tokens are


def test_mac_recalls_from_the_memory_as_it_was_before_the_segment():
    mixer, config = mixer_of("mac")
    x = inputs()
    whole = TokenSequence(config.schedule, 1, 8)
    _, at_start = mixer(x[:, :8], whole, None, True)
    _, inside = mixer(x[:, :15], TokenSequence(config.schedule, 1, 15), None, True)
    for before, kept, initial in zip(at_start.memory.memory.weights, inside.weights, mixer.initial):
        assert_near(kept, before)
        assert (kept[0] - initial).abs().max() > 1e-6
    for now, kept in zip(inside.memory.memory.weights, inside.weights):  # a boundary of the chunk, inside the segment
        assert (now - kept).abs().max() > 1e-6


@pytest.mark.parametrize("planted", [1e30, float("nan")])
@forms
def test_locked_units_reach_nothing_in_any_form(form, planted):
    model, ids = make(options("titans", titans_variant=form, **SCHEDULED, persistent_tokens=3)), tokens(2, 6)
    results = []
    for value in (None, planted):
        for layer in model.layers if value is not None else ():
            first, last = layer.mixer.initial
            with torch.no_grad():
                first[..., 4:] = value
                last[:, 4:] = value
        model.zero_grad()
        out = model(ids, labels=ids, use_cache=True)
        out.loss.backward()
        step = model(ids[:, :1], past_key_values=model(ids[:, :5], use_cache=True).past_key_values).logits
        results.append([out.logits, out.loss, step, *(p.grad.clone() for p in model.parameters())])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("form", ["mac", "mag", "mal"])
def test_gradients_are_those_of_finite_differences_across_segments(form):
    mixer, config = mixer_of(form, **SCHEDULED, persistent_tokens=2)
    sequence = TokenSequence(config.schedule, 1, T)
    x = inputs().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: mixer(x, sequence)[0], x, fast_mode=True)
    mixer.requires_grad_()
    p, w = mixer.persistent, mixer.W1
    with torch.no_grad():
        direction = [torch.randn_like(t) for t in (p, w)]
    loss = mixer(x.detach(), sequence)[0].square().sum()
    slopes = torch.autograd.grad(loss, (p, w))
    wanted = sum((s * d).sum() for s, d in zip(slopes, direction))
    ends = []
    with torch.no_grad():
        for sign in (1, -2):
            for t, d in zip((p, w), direction):
                t += sign * 1e-5 * d
            ends.append(mixer(x, sequence)[0].square().sum())
    # A central difference of step 1e-5 is right to about 1e-10, and rounding adds 1e-16 / 1e-5.
    assert (ends[0] - ends[1]).item() / 2e-5 == pytest.approx(wanted.item(), rel=1e-6)


# Persistent tokens.


@pytest.mark.parametrize("form", ["lmm", "mag", "mal"])
def test_persistent_tokens_are_one_chunk_in_the_first_block_before_position_zero(form):
    mixer, config = mixer_of(form, **SCHEDULED, persistent_tokens=4)
    state = mixer.init_state(2, "cpu", torch.float64)
    memory = (state if form == "lmm" else state.memory).memory
    _, before = remembered(mixer, inputs()[0, :1], config, mixer.persistent)
    for layer in range(2):
        wanted = torch.stack([weights[layer] for weights in before[0]])
        assert_near(memory.weights[layer], wanted.expand(2, -1, -1, -1))
    assert (memory.position == 0).all() and (memory.active == 0).all()
    assert torch.equal(memory.weights[0][0, ..., 4:], mixer.W1[..., 4:])  # four blocks of four units
    assert torch.equal(memory.weights[1][0, :, 4:], mixer.W2[:, 4:])
    assert (memory.momentum[0][..., 4:] == 0).all() and (memory.momentum[0][..., :4] != 0).any()


@forms
def test_persistent_tokens_are_not_counted(form):
    model = make(options("titans", titans_variant=form, **SCHEDULED, persistent_tokens=4))
    cache = model(tokens(2, 6), use_cache=True).past_key_values
    assert (cache.position == 6).all() and cache.get_seq_length() == 6
    norms = model.memory_norms(cache)
    assert (norms[..., 0] > 0).all() and (norms[..., 1:] == 0).all()  # the second block opens at position 6


@forms
def test_persistent_tokens_matter_to_the_first_and_to_the_last_token(form):
    model, ids = make(options("titans", titans_variant=form, persistent_tokens=2)), tokens(1, 30)
    with torch.no_grad():
        base = model(ids).logits
        for layer in model.layers:
            layer.mixer.persistent += 1
        changed = (model(ids).logits - base).abs().amax(-1)[0]
    assert changed[0] > 1e-6 and changed[-1] > 1e-6


def test_attention_meets_persistent_tokens_alike_at_every_position():
    config = ProteusConfig(**options("attention", window=1))
    attention = make(options("attention", window=1)).layers[0].mixer
    x = inputs()[:, :1].expand(1, 50, 16)
    persistent = torch.randn(3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    y, _ = attention.attend(x, TokenSequence(config.schedule, 1, 50), persistent=persistent)
    alone, _ = attention.attend(x, TokenSequence(config.schedule, 1, 50))
    assert_near(y, y[:, :1].expand_as(y))
    assert (y - alone).abs().max() > 1e-3


# Segments.


@pytest.mark.parametrize(
    ("starts", "lengths", "packed"),
    [
        ([0, 0], [21, 21], False),
        ([3, 11], [21, 21], False),
        ([3, 4], [21, 21], False),
        ([0, 0, 0], [1, 20, 9], True),
        ([5, 8, 15], [8, 1, 30], True),
    ],
)
def test_segments_hold_every_token_once_and_are_cut_at_multiples_of_each_rows_position(starts, lengths, packed):
    schedule = ProteusConfig().schedule
    bounds = torch.tensor([0, *lengths]).cumsum(0) if packed else None
    length = sum(lengths) if packed else lengths[0]
    sequence = TokenSequence(schedule, len(starts), length, offset=torch.tensor(starts), cu_seqlens=bounds)
    row_of = torch.cat([torch.full((n,), row) for row, n in enumerate(lengths)])
    position_of = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths)])
    seen = []
    for number, part in enumerate(segments(sequence, 8)):
        index = part.index.flatten()
        seen.append(index)
        rows, positions = row_of[index], position_of[index]
        for row in rows.unique():
            assert (positions[rows == row] // 8 == starts[row] // 8 + number).all()
        assert torch.equal(part.sequence.positions.expand(part.index.shape).flatten(), positions)
        values = torch.arange(index.numel(), dtype=torch.float64).view(*part.index.shape, 1)
        assert torch.equal(part.gather(part.spread(values)), values)
        kept = part.keep(torch.full((part.sequence.rows, 8, 1), -1.0), values)
        assert (kept >= 0).sum() == index.numel()
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(sum(lengths)))


def test_rows_a_whole_segment_apart_go_on_as_they_would_alone():
    mixer, config = mixer_of("mac", **SCHEDULED, persistent_tokens=2)
    x = inputs(2, 30)
    states = [mixer(x[row : row + 1, :n], TokenSequence(config.schedule, 1, n), None, True)[1] for row, n in ((0, 3), (1, 11))]
    state = mixer.put_rows(mixer.init_state(2, "cpu", torch.float64), torch.tensor([0]), states[0])
    state = mixer.put_rows(state, torch.tensor([1]), states[1])
    following = torch.stack((x[0, 3:17], x[1, 11:25]))
    y, _ = mixer(following, TokenSequence(config.schedule, 2, 14, offset=torch.tensor([3, 11])), state)
    for row, n in ((0, 3), (1, 11)):
        whole, _ = mixer(x[row : row + 1, : n + 14], TokenSequence(config.schedule, 1, n + 14))
        assert_near(y[row], whole[0, n:])


# Configuration and counts.


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"segment_length": 64}, ["segment_length is 64", "'lmm'", "titans (mac)"]),
        ({"window": 64}, ["window is 64", "'lmm'", "titans (mag)", "attention"]),
        ({"titans_variant": "mac", "window": 64}, ["window is 64", "'mac'"]),
        ({"titans_variant": "mal", "mag_combine": "add"}, ["mag_combine is 'add'", "'mal'", "titans (mag)"]),
        ({"titans_variant": "mag", "mag_combine": "mean"}, ["mag_combine is 'mean'", "sigmoid_gate"]),
        ({"titans_variant": "mac", "segment_length": 100}, ["segment_length is 100", "chunk_size 64", "use 64"]),
        ({"titans_variant": "mac", "segment_length": 10}, ["segment_length is 10", "use 64"]),
        ({"persistent_tokens": 65}, ["persistent_tokens is 65", "chunk_size 64"]),
        ({"persistent_tokens": -1}, ["persistent_tokens is -1", "at least 0"]),
        ({"mixer": "comba", "persistent_tokens": 4}, ["persistent_tokens is 4", "comba"]),
        ({"mixer": "comba", "titans_variant": "mag"}, ["titans_variant is 'mag'", "comba"]),
        ({"titans_variant": "magg"}, ["titans_variant is 'magg'", "did you mean mag"]),
        ({"titans_variant": "mag", "head_dim": 5}, ["head_dim", "even"]),
    ],
)
def test_a_field_that_does_not_apply_or_fit_raises(fields, words):
    with pytest.raises(ValueError) as error:
        ProteusConfig(**fields)
    assert all(word in str(error.value) for word in words), error.value


@forms
def test_a_form_alone_is_a_whole_configuration(form):
    config = ProteusConfig(titans_variant=form)
    assert (config.window, config.segment_length) == {"mac": (None, 512), "lmm": (None, None)}.get(form, (512, None))
    assert ProteusConfig(**config.to_diff_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize("changes", CHANGES, ids=["plain", "persistent", "scheduled", "both"])
@forms
def test_parameters_and_state_are_as_large_as_the_form_says(form, changes):
    mixer, config = mixer_of(form, **changes)
    assert sum(p.numel() for p in mixer.parameters()) == mixer.parameter_count(config)
    state = mixer.init_state(3, "cpu", torch.float64)
    assert sum(t.numel() for t in tensors(state)) == 3 * mixer.state_size(config, 0)


def test_operations_of_the_forms_are_those_of_their_parts():
    length, hidden, width = 21, 16, 16
    configs = [ProteusConfig(**options("titans", titans_variant=form, persistent_tokens=3)) for form in FORMS]
    flops = {c.titans_variant: c.mixer_class.flops_per_token(c, length) for c in configs}
    output = 2 * 2 * hidden * width
    window = AttentionMixer.flops_per_token(ProteusConfig(**options("attention", window=5)), length) + 4 * width * 3
    assert flops["mag"] == pytest.approx(flops["lmm"] - output + window)
    assert flops["mal"] == pytest.approx(flops["lmm"] + window)
    seen = sum(2 * (t % 8 + 1) + 3 for t in range(length)) / length  # h and S up to the token, and P
    maps = 2 * (4 * hidden * width + 2 * hidden * width + width * hidden + width * (hidden + 4))
    read = 2 * 2 * (8 * 16 + 16 * 8)
    assert flops["mac"] == pytest.approx(flops["lmm"] - output + maps + 4 * width * seen + read)


# Generation and types.


@forms
def test_generate_past_segments_with_left_padding_is_what_full_forwards_say(form):
    model = make(options("titans", titans_variant=form, **SCHEDULED, persistent_tokens=3))
    ids, mask = tokens(2, 5), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    text = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
    for row in range(2):
        start = int(mask[row].sum())
        alone = text[row : row + 1, 5 - start :]
        logits = model(alone, use_cache=False).logits
        assert torch.equal(logits[0, start - 1 : -1].argmax(-1), text[row, 5:])


@forms
def test_a_model_loaded_in_bf16_keeps_its_persistent_tokens_in_fp32_and_decodes(form, tmp_path):
    model = make(options("titans", titans_variant=form, persistent_tokens=3), torch.float32)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert loaded.layers[0].mixer.persistent.dtype == torch.float32
    ids = tokens(2, 21)
    with torch.no_grad():
        whole = loaded(ids, use_cache=True)
        cache, parts = None, []
        for part in ids.split([9, 1, 1, 10], 1):
            out = loaded(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
        wanted = model(ids).logits
    # Weights and activations of two layers hold 8 bits, 4e-3 each; the wide weights of this test make the differences grow.
    assert_near(torch.cat(parts, 1).float(), whole.logits.float(), 5e-2)
    assert_near(whole.logits.float(), wanted, 1e-1)


@pytest.mark.parametrize("blocks", [1, 4])
def test_mac_under_compile_keeps_its_loop_and_gives_the_same_numbers(blocks, monkeypatch):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    pieces = titans_mac.Pieces(*(torch.compile(piece, backend=counter) for piece in titans_mac.EAGER))
    monkeypatch.setattr(titans_mac, "_compiled", lambda: pieces)
    torch.manual_seed(0)
    fields = {"titans_variant": "mac", "segment_length": 16, "persistent_tokens": 2, "chunk_size": 8}
    schedule = {"memory_blocks": blocks, "memory_context": 64}
    config = ProteusConfig(vocab_size=40, hidden_size=16, num_heads=2, num_hidden_layers=2, mixer="titans", **fields, **schedule)
    model = ProteusForCausalLM(config).double()
    compiled, found, graphs = torch.compile(model, backend="aot_eager"), [], []
    for run in (model, compiled):
        for length in (48, 80, 112):  # once for new strides, then never again
            graphs.append(counter.frame_count)
            ids = torch.randint(0, 40, (2, length), generator=torch.Generator().manual_seed(length))
            loss = run(ids, labels=ids).loss
            found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for eager, other in zip(found[:3], found[3:]):
        for a, b in zip(eager, other):
            assert_near(a, b)
    assert 0 < graphs[-1] == counter.frame_count, f"{graphs[-1]} graphs for eight segments, {counter.frame_count} with seven more"
