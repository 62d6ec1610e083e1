"""Titans' memory: what it writes against gradient descent by autograd, its options, and what is locked."""

from __future__ import annotations

import pytest
import torch

from proteus_lm import ProteusCache, ProteusConfig, ProteusForCausalLM
from proteus_lm.mixers import TitansMixer
from proteus_lm.sequence import TokenSequence
from tests.mixers.models import CONTEXT, assert_near, make, options, tokens, train_finitely, update

T = 11


def inputs(rows=2, length=T):
    return torch.randn(rows, length, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def by_hand(mixer, x, config):
    """One head of one row at a time, with torch's own gradient of the loss (spec/deep.md 1.1; no schedule)."""
    parts, _ = mixer.projection(x, TokenSequence(config.schedule, len(x), x.shape[1]))
    q, k, v = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in parts)
    theta, alpha, eta = mixer._step_sizes(x)
    act = (
        torch.nn.functional.silu
        if config.memory_activation == "silu"
        else lambda z: torch.nn.functional.gelu(z, approximate="tanh")
    )

    def memory(weights, x):
        z, (*hidden, last) = x, weights
        if config.memory_activation == "swiglu":
            for gate, value in zip(hidden[::2], hidden[1::2], strict=True):
                z = torch.nn.functional.silu(z @ gate) * (z @ value)
        else:
            for w in hidden:
                z = act(z @ w)
        z = z @ last
        if not config.memory_residual_norm:
            return z
        return x + torch.nn.functional.layer_norm(z, z.shape[-1:], mixer.gain[head], mixer.bias[head], eps=1e-6)

    read = torch.zeros_like(v)
    for row in range(len(x)):
        for head in range(config.num_heads):
            weights = [w[head].detach() for w in mixer.initial]
            momentum, frozen = [torch.zeros_like(w) for w in weights], weights
            for t in range(x.shape[1]):
                if t % config.chunk_size == 0:
                    frozen = weights
                leaves = [w.clone().requires_grad_() for w in frozen]
                with torch.enable_grad():
                    loss = 0.5 * (memory(leaves, k[row, t, head]) - v[row, t, head]).square().sum()
                gradients = torch.autograd.grad(loss, leaves)
                if config.surprise_clip is not None:
                    norm = sum(g.square().sum() for g in gradients).sqrt()
                    gradients = [g * min(1.0, config.surprise_clip / norm) for g in gradients]
                before = weights
                momentum = [eta[row, t, head] * s - theta[row, t, head] * g for s, g in zip(momentum, gradients)]
                weights = [(1 - alpha[row, t, head]) * w + s for w, s in zip(weights, momentum)]
                if config.decay_target == "init":
                    weights = [w + alpha[row, t, head] * w0[head] for w, w0 in zip(weights, mixer.initial)]
                read[row, t, head] = memory(weights if config.read == "post" else before, q[row, t, head])
    return mixer.output(read, x)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"memory_depth": 3},
        {"memory_depth": 1, "memory_expansion": 4},
        {"read": "pre"},
        {"memory_activation": "silu"},
        {"memory_activation": "swiglu"},
        {"memory_activation": "swiglu", "memory_depth": 4, "read": "pre"},
        {"memory_activation": "swiglu", "use_momentum": False, "use_forgetting": False},
        {"memory_activation": "swiglu", "memory_residual_norm": True, "surprise_clip": 0.7, "decay_target": "init"},
        {"use_momentum": False},
        {"use_forgetting": False},
        {"decay_target": "init"},
        {"surprise_clip": 0.7},
        {"memory_residual_norm": True},
        {"memory_residual_norm": True, "memory_depth": 1, "memory_expansion": 4, "surprise_clip": 2.0},
        {"surprise_clip": 0.3, "decay_target": "init", "memory_depth": 3},
        {"chunk_size": 1, "theta_scale": 0.3},
    ],
    ids=str,
)
def test_the_memory_learns_by_gradient_descent(changes):
    fields = options("titans", **changes)
    mixer, config, x = make(fields).layers[0].mixer, ProteusConfig(**fields), inputs()
    with torch.no_grad():
        for parameter in mixer.norm or ():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
        wanted = by_hand(mixer, x, config)
        y, _ = mixer(x, TokenSequence(config.schedule, 2, T))
        assert_near(y, wanted)
        state = mixer.init_state(2, "cpu", torch.float64)
        for t in range(T):
            step = TokenSequence(config.schedule, 2, 1, offset=torch.tensor([t, t]))
            y, state = mixer(x[:, t : t + 1], step, state, True)
            assert_near(y, wanted[:, t : t + 1])


@pytest.mark.parametrize(
    ("depth", "function"), [(1, "gelu_tanh"), (2, "gelu_tanh"), (3, "gelu_tanh"), (2, "swiglu"), (3, "swiglu")]
)
@pytest.mark.parametrize("planted", [1e30, float("nan")])
def test_locked_units_of_the_first_memory_keep_their_bits_and_reach_nothing(depth, function, planted):
    fields = options("titans", memory_depth=depth, memory_activation=function, memory_blocks=4, memory_context=CONTEXT)
    if depth == 1:
        del fields["memory_expansion"]
    model, ids = make(fields), tokens(2, 6)  # the second block opens at position 6
    results = []
    for value in (None, planted):
        for layer in model.layers:
            mixer = layer.mixer
            for place, w in zip(mixer.places, mixer.initial, strict=True):
                first_unit = slice(mixer.units // 4, None)
                parts = [w[:, first_unit]] if place != "first" else []
                parts += [w[..., first_unit]] if place != "last" else []
                if value is not None:
                    with torch.no_grad():
                        for part in parts:
                            part.fill_(value)
        model.zero_grad()
        out = model(ids, labels=ids, use_cache=True)
        out.loss.backward()
        step = model(ids[:, :1], past_key_values=model(ids[:, :5], use_cache=True).past_key_values).logits
        grads = [p.grad.clone() for p in model.parameters()]
        results.append([out.logits, out.loss, step, *grads])
        for layer, state in zip(model.layers, out.past_key_values.states, strict=True):
            mixer = layer.mixer
            kept = slice(mixer.units // 4, None)
            for place, now, start in zip(mixer.places, state.memory.weights, mixer.initial, strict=True):
                now, start = (w[..., kept, :] if place == "last" else w[..., kept] for w in (now, start))
                assert torch.equal(now.nan_to_num(7.0), start.expand_as(now).nan_to_num(7.0))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_step_sizes_stay_within_the_safe_bound_at_any_gate():
    mixer = make(options("titans", theta_scale=0.5)).layers[0].mixer
    with torch.no_grad():
        theta, alpha, eta = mixer._step_sizes(1000 * inputs())
        assert theta.dtype == torch.float64
        assert (theta * 4 <= 0.5 * (1 - eta) + 1e-12).all() and (theta >= 0).all()
        assert ((alpha >= 0) & (alpha <= 1)).all()
        for gate in (mixer.theta, mixer.alpha, mixer.eta):
            gate.weight.zero_()
        theta, alpha, eta = mixer._step_sizes(inputs())
    assert_near(eta, torch.full_like(eta, 0.9), 1e-6)
    assert_near(alpha, torch.full_like(alpha, 0.01), 1e-6)
    assert_near(theta * 4 / (1 - eta), torch.full_like(eta, 0.25), 1e-6)


PLAIN = [(1, "gelu_tanh", 1), (2, "gelu_tanh", 1), (3, "gelu_tanh", 2 / 3), (4, "silu", 1 / 2)]
GATED = [(2, "swiglu", 1), (3, "swiglu", 3 / 11), (4, "swiglu", 3 / 43)]


@pytest.mark.parametrize(("depth", "function", "part"), PLAIN + GATED)
def test_the_largest_step_falls_as_one_over_the_curvature_from_two_layers_on(depth, function, part):
    changes = {"memory_activation": function, "memory_expansion": 4, "theta_scale": 0.6}
    mixer = make(options("titans", memory_depth=depth, **changes)).layers[0].mixer
    with torch.no_grad():
        mixer.theta.bias.fill_(1000.0)
        theta, _, eta = mixer._step_sizes(inputs())
    assert_near(theta * 4 / (1 - eta), torch.full_like(eta, 0.6 * part))


@pytest.mark.parametrize("function", ["gelu_tanh", "swiglu"])
@pytest.mark.parametrize("depth", [2, 3, 4, 5])
def test_the_largest_step_falls_with_the_curvature_of_a_product_of_gains_that_learned_its_pair(depth, function):
    """Gains of 1 between a key 1 and a value 1, a gated layer being (w x)(u x); the loss's second derivatives by autograd."""

    def curvature(layers):
        arity = 2 if function == "swiglu" else 1

        def loss(gains):
            x = gains.new_ones(())
            for layer in gains[:-1].view(layers - 1, arity):
                x = (layer * x).prod()
            return 0.5 * (gains[-1] * x - 1).square()

        hessian = torch.autograd.functional.hessian(loss, torch.ones(arity * (layers - 1) + 1, dtype=torch.float64))
        return torch.linalg.eigvalsh(hessian).max().item()

    bound = TitansMixer.step_bound(ProteusConfig(memory_depth=depth, memory_activation=function))
    assert bound == pytest.approx(curvature(2) / curvature(depth))


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("dim", [4, 6])
def test_a_tokens_step_falls_with_the_curvature_that_the_residual_norm_adds(depth, dim):
    """Matrices that answer a unit key with the direction of v - k, of length sqrt(2); second derivatives by autograd."""
    key = torch.randn(dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    key = torch.nn.functional.normalize(key - key.mean(), dim=0)  # what a norm can answer with

    def curvature(answer, wanted):
        def loss(weights):
            return 0.5 * (answer(key @ torch.linalg.multi_dot([*weights])) - wanted).square().sum()

        start = torch.eye(dim, dtype=torch.float64).repeat(depth, 1, 1)
        hessian = torch.autograd.functional.hessian(loss, start).view(start.numel(), start.numel())
        return torch.linalg.eigvalsh(hessian).max().item()

    plain = curvature(lambda z: z, key)
    normed = curvature(lambda z: torch.nn.functional.layer_norm(z, (dim,), eps=0.0), 2**0.5 * key)
    bounds = [
        TitansMixer.step_bound(ProteusConfig(chunk_size=1, head_dim=dim, memory_depth=depth, memory_residual_norm=norm))
        for norm in (False, True)
    ]
    assert bounds[1] / bounds[0] == pytest.approx(plain / normed)


@pytest.mark.parametrize(("chunk", "part"), [(1, 1 / 8), (4, 1 / 2), (8, 1), (64, 1)])
def test_a_chunk_moves_a_residual_memory_by_at_most_its_tokens_steps_and_the_plain_bound(chunk, part):
    config = ProteusConfig(head_dim=32, chunk_size=chunk, memory_residual_norm=True, theta_scale=0.7)
    assert TitansMixer.step_bound(config) == 0.7 * part
    config = ProteusConfig(head_dim=32, chunk_size=chunk, theta_scale=0.7)
    assert TitansMixer.step_bound(config) == 0.7


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 4])
def test_a_fresh_residual_memory_decodes_in_fp32_what_it_reads_in_parallel(depth, chunk):
    """Rounding is all that differs, and stays so: in chunks of 1 with a bound of 1 it grew to 1e-4 (depth 2) and 7e-3 (4)."""
    shape = {"hidden_size": 32, "num_heads": 2, "vocab_size": 31, "intermediate_size": 16}
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = ProteusForCausalLM(ProteusConfig(**shape, chunk_size=chunk, memory_depth=depth, memory_residual_norm=True)).eval()
        ids, cache = torch.randint(0, 31, (1, 96)), ProteusCache()
        with torch.no_grad():
            steps = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(96)]
            assert_near(torch.cat(steps, 1), model(ids).logits)


@pytest.mark.parametrize(
    ("depth", "function"), [(1, "gelu_tanh"), (2, "gelu_tanh"), (4, "gelu_tanh"), (2, "swiglu"), (3, "swiglu"), (4, "swiglu")]
)
def test_the_memory_stays_bounded_over_equal_keys_and_gates_wide_open(depth, function):
    fields = options("titans", memory_depth=depth, memory_activation=function, memory_expansion=4, chunk_size=64)
    mixer, config = make(fields).layers[0].mixer, ProteusConfig(**fields)
    with torch.no_grad():
        mixer.theta.bias.fill_(20.0)
        mixer.alpha.bias.fill_(-20.0)
        x = inputs(1, 1)[:, :1].expand(1, 512, 16) + 0.1 * inputs(1, 512)
        y, state = mixer(x, TokenSequence(config.schedule, 1, 512), use_state=True)
        assert y.isfinite().all() and mixer.memory_norm(state, config.schedule).max() < 100


@pytest.mark.slow
@pytest.mark.timeout(3600)  # two minutes each on an idle core
@pytest.mark.parametrize("chunk", [4, 1])
@pytest.mark.parametrize(("depth", "function"), [(3, "gelu_tanh"), (4, "gelu_tanh"), (3, "swiglu"), (4, "swiglu")])
def test_a_deep_memory_trains_in_bf16_for_five_hundred_steps_with_the_default_step(depth, function, chunk):
    scheduled = {"memory_blocks": 4, "memory_context": CONTEXT}
    fields = options("titans", memory_depth=depth, memory_activation=function, chunk_size=chunk, **scheduled)
    train_finitely(fields, steps=500, length=48)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("blocks", [1, 4])
def test_a_surprise_clip_keeps_a_deep_gated_memory_finite_where_training_makes_its_weights_large(blocks):
    """Without it this went to NaN at step 25 (one block) and 41 (four): docs/titans-forms.md."""
    memory = {"memory_depth": 4, "memory_expansion": 2, "memory_activation": "swiglu", "chunk_size": 16, "surprise_clip": 1.0}
    shape = {"hidden_size": 32, "num_heads": 2, "vocab_size": 32, "memory_blocks": blocks, "memory_context": 64}
    torch.manual_seed(0)
    model = ProteusForCausalLM(ProteusConfig(**shape, **memory)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(500):
        ids = torch.randint(0, 32, (2, 33)).repeat(1, 3)[:, :96]
        update(model, optimizer, model(ids, labels=ids).loss, step)


@pytest.mark.parametrize(
    ("depth", "function"), [(1, "gelu_tanh"), (2, "gelu_tanh"), (3, "gelu_tanh"), (2, "swiglu"), (3, "swiglu")]
)
def test_block_norms_add_up_to_the_norm_of_what_was_learned(depth, function):
    fields = options(
        "titans", memory_depth=depth, memory_activation=function, memory_expansion=4, memory_blocks=4, memory_context=4
    )
    mixer, config = make(fields).layers[0].mixer, ProteusConfig(**fields)
    with torch.no_grad():
        _, state = mixer(inputs(length=8), TokenSequence(config.schedule, 2, 8), use_state=True)
        norms = mixer.memory_norm(state, config.schedule)
        total = sum((w - w0).square().sum((1, 2, 3)) for w, w0 in zip(state.memory.weights, mixer.initial))
    assert (norms > 0).all()
    assert_near(norms.square().sum(1), total)  # 8 tokens are whole chunks: the boundary's weights are the current ones


def test_operations_are_those_of_the_table_of_spec_deep_2_5():
    def memory(length=8192, **changes):
        config = ProteusConfig(hidden_size=64, num_heads=1, memory_context=8192, **changes)
        dense = 2 * (3 * 64 * (64 + 4) + 64 * (1 + config.use_momentum + config.use_forgetting)) + 4 * 64 * 64
        return TitansMixer.flops_per_token(config, length) - dense

    assert memory() == 22 * 64 * 256 + 4 * 64 * (64 + 256)
    assert memory(use_momentum=False) == 14 * 64 * 256 + 4 * 64 * (64 + 256)
    assert memory(decay_target="init") == memory() + 2 * (2 * 64 * 256)  # one more read of both matrices
    share = (1 + 1 / 16) / 2
    assert memory(memory_blocks=16) == pytest.approx(22 * 64 * 256 * share + 4 * 64 * (64 + 256 * share))
    # Gate and value take 10 dh each, W2 12; what each puts out has its own product with the mix, what they take in one similarity.
    swiglu = {"memory_activation": "swiglu"}
    assert memory(**swiglu) == 32 * 64 * 256 + 2 * 64 * (64 + 2 * 256 + 256 + 64)
    assert memory(memory_blocks=16, **swiglu) == pytest.approx(32 * 64 * 256 * share + 2 * 64 * (2 * 64 + 3 * 256 * share))


def test_a_gated_memory_starts_as_large_as_a_plain_one():
    """What it answers to unit keys, and the curvature of the loss there, which bounds a safe step (spec/deep.md 6)."""
    keys = torch.nn.functional.normalize(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), dim=-1).double()
    silu, sizes = torch.nn.functional.silu, {}
    for function in ("silu", "swiglu"):
        fields = options("titans", hidden_size=64, num_heads=1, head_dim=64, memory_expansion=4, memory_activation=function)
        weights = tuple(w.detach()[0] for w in make(fields).layers[0].mixer.initial)
        answers, curvatures = [], []
        for key in keys:

            def answer(*weights, key=key, function=function):
                return (silu(key @ weights[0]) * (key @ weights[1] if function == "swiglu" else 1)) @ weights[-1]

            jacobian = torch.cat([j.flatten(1) for j in torch.autograd.functional.jacobian(answer, weights)], 1)
            answers.append(answer(*weights).square().sum())
            curvatures.append(torch.linalg.eigvalsh(jacobian @ jacobian.T)[-1])
        sizes[function] = torch.stack(answers).mean(), torch.stack(curvatures).mean()
    for plain, gated in zip(sizes["silu"], sizes["swiglu"], strict=True):
        assert 0.5 < gated / plain < 2
