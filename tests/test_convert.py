"""Weights of flash-linear-attention: a model of fla's names, computed as fla's layers do, equals ours after conversion."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d, pad, silu, softplus

from proteus_lm import ProteusConfig, ProteusForCausalLM
from proteus_lm.convert import config_from_fla, from_fla
from tests.mixers.models import assert_near, tokens

HIDDEN, HEADS, LAYERS, T = 16, 2, 2, 13
COMMON = {"hidden_size": HIDDEN, "num_heads": HEADS, "num_hidden_layers": LAYERS, "vocab_size": 31, "norm_eps": 1e-6}
COMMON |= {"intermediate_size": 24, "hidden_act": "swish", "attn": None, "max_position_embeddings": 2048, "fuse_norm": True}
# As fla's configuration classes write them, where a test may read it.
FLA = {
    "retnet": {**COMMON, "model_type": "retnet", "expand_k": 1.0, "expand_v": 2.0, "hidden_ratio": 2, "num_kv_heads": None},
    "delta_net": {**COMMON, "model_type": "delta_net", "expand_k": 1.0, "expand_v": 1.0, "conv_size": 4, "use_gate": False},
    "gated_deltanet": {**COMMON, "model_type": "gated_deltanet", "head_dim": 6, "expand_v": 2.0, "conv_size": 3},
    "comba": {**COMMON, "model_type": "comba", "head_dim": 6, "expand_v": 2.0, "conv_size": 4, "use_output_correction": True},
}
every = pytest.mark.parametrize("kind", FLA)


def shapes(kind):
    """Names and shapes of fla.models' parameters (fla-core 0.6.0)."""
    values = FLA[kind]
    keys = HEADS * values["head_dim"] if "head_dim" in values else HIDDEN
    width = int(keys * values["expand_v"])
    layer = {"q_proj.weight": (keys, HIDDEN), "k_proj.weight": (keys, HIDDEN), "v_proj.weight": (width, HIDDEN)}
    layer |= {"o_proj.weight": (HIDDEN, width)}
    norm = "g_norm_swish_gate" if kind == "retnet" else "o_norm"
    layer[f"{norm}.weight"] = (width // HEADS,)
    if kind != "delta_net":
        layer["g_proj.weight"] = (width, HIDDEN)
    if kind != "retnet":
        layer |= {f"{n}_conv1d.weight": (w, 1, values["conv_size"]) for n, w in (("q", keys), ("k", keys), ("v", width))}
        layer["b_proj.weight"] = (HEADS, HIDDEN)
    if kind in ("gated_deltanet", "comba"):
        layer |= {"a_proj.weight": (HEADS, HIDDEN), "A_log": (HEADS,), "dt_bias": (HEADS,)}
    if kind == "comba":
        layer |= {"decay": (HEADS,), "D": (HEADS,)}
    block = {f"attn.{name}": shape for name, shape in layer.items()}
    block |= {"attn_norm.weight": (HIDDEN,), "mlp_norm.weight": (HIDDEN,)}
    block |= {"mlp.gate_proj.weight": (24, HIDDEN), "mlp.up_proj.weight": (24, HIDDEN), "mlp.down_proj.weight": (HIDDEN, 24)}
    names = {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in block.items()}
    return {**names, "model.embeddings.weight": (31, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (31, HIDDEN)}


def weights(kind):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4 + ("norm" in name)
        for name, shape in shapes(kind).items()
    }


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def half_split(x):
    """fla.modules.rotary with interleaved=False: coordinate i turns with i + K/2."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1]).double()[:, None] / 10_000.0 ** (torch.arange(half).double() / half)
    cosine, sine = angle.cos()[:, None], angle.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def fla_layer(kind, w, x):
    """forward of fla.layers.{MultiScaleRetention, DeltaNet, GatedDeltaNet, Comba}, one token at a time. w: by fla's names."""

    def project(name):
        y = x @ w[f"{name}_proj.weight"].T
        if kind != "retnet":
            taps = w[f"{name}_conv1d.weight"]
            y = silu(conv1d(pad(y.mT, (taps.shape[-1] - 1, 0)), taps, groups=len(taps)).mT)
        return y.unflatten(-1, (HEADS, -1))

    q, k, v = project("q"), project("k"), project("v")
    p, g, beta = k, x.new_zeros(*x.shape[:2], HEADS), x.new_ones(*x.shape[:2], HEADS)
    if kind == "retnet":
        q, k = half_split(q), half_split(k)
        g = g + torch.log(1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=torch.float64)))
    else:
        beta = torch.sigmoid(x @ w["b_proj.weight"].T)
    if kind in ("gated_deltanet", "comba"):
        g = -w["A_log"].exp() * softplus(x @ w["a_proj.weight"].T + w["dt_bias"])
    if kind == "comba":
        p = k * torch.sigmoid(w["decay"])[:, None]
        q = q - w["D"][:, None] * p
    if kind != "retnet":
        q, k, p = unit(q), unit(k), unit(p)  # in the kernel
    S, reads = x.new_zeros(len(x), HEADS, k.shape[-1], v.shape[-1]), []
    for t in range(x.shape[1]):
        decayed = g[:, t].exp()[..., None, None] * S
        seen = decayed if kind == "gated_deltanet" else S
        error = v[:, t] if kind == "retnet" else v[:, t] - torch.einsum("bhk,bhkv->bhv", p[:, t], seen)
        S = decayed + (beta[:, t, :, None] * k[:, t])[..., None] * error[..., None, :]
        reads.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) * q.shape[-1] ** -0.5)
    read = rms(torch.stack(reads, 1), w["g_norm_swish_gate.weight" if kind == "retnet" else "o_norm.weight"])
    if kind != "delta_net":
        gate = (x @ w["g_proj.weight"].T).unflatten(-1, (HEADS, -1))
        read = read * (torch.sigmoid(gate) if kind == "comba" else silu(gate))
    return read.flatten(-2) @ w["o_proj.weight"].T


def layer_of(state, i):
    start = f"model.layers.{i}.attn."
    return {name.removeprefix(start): x for name, x in state.items() if name.startswith(start)}


def fla_model(kind, state, ids):
    x = state["model.embeddings.weight"][ids]
    for i in range(LAYERS):
        block = {name.removeprefix(f"model.layers.{i}."): x for name, x in state.items() if f"layers.{i}." in name}
        x = x + fla_layer(kind, layer_of(state, i), rms(x, block["attn_norm.weight"]))
        y = rms(x, block["mlp_norm.weight"])
        y = silu(y @ block["mlp.gate_proj.weight"].T) * (y @ block["mlp.up_proj.weight"].T)
        x = x + y @ block["mlp.down_proj.weight"].T
    return rms(x, state["model.norm.weight"]) @ state["lm_head.weight"].T


def ours(kind, state, **changes):
    config = config_from_fla(FLA[kind], **changes)
    model = ProteusForCausalLM(config).double().eval()
    model.load_state_dict(from_fla(state, config))
    return model


@every
def test_a_converted_model_gives_the_logits_of_flas(kind):
    state, ids = weights(kind), tokens(2, T)
    model = ours(kind, state)
    assert_near(model(ids).logits, fla_model(kind, state, ids))


@every
def test_a_single_layer_converts_too(kind):
    state, config = weights(kind), config_from_fla(FLA[kind])
    mixer = ours(kind, state).layers[1].mixer
    other = config.mixer_class(config).double()
    other.load_state_dict(from_fla(layer_of(state, 1), config))
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, mixer.get_parameter(name))


def test_retention_without_permuted_rows_would_be_another_model():
    state, ids = weights("retnet"), tokens(2, T)
    model = ours("retnet", state)
    with torch.no_grad():
        for i, block in enumerate(model.layers):
            w = layer_of(state, i)
            block.mixer.projection.linear.weight.copy_(torch.cat([w[f"{n}_proj.weight"] for n in "qkv"]))
    assert (model(ids).logits - fla_model("retnet", state, ids)).abs().max() > 1e-2


@every
def test_a_converted_model_takes_a_schedule(kind):
    state, ids = weights(kind), tokens(2, T)
    model = ours(kind, state, memory_blocks=2, memory_context=8, memory_axis="value")
    assert (model(ids).logits - fla_model(kind, state, ids))[:, 0].abs().max() > 1e-3
    assert model.config.memory_blocks == 2


def test_frequencies_in_older_files_and_unfused_norms_are_understood():
    state, ids = weights("retnet"), tokens(1, 5)
    old = {name.replace("g_norm_swish_gate", "g_norm"): x for name, x in state.items()}
    old["model.layers.0.attn.rotary.inv_freq"] = torch.ones(4)
    assert torch.equal(ours("retnet", old)(ids).logits, ours("retnet", state)(ids).logits)


def test_tied_embeddings_need_no_head():
    state, ids = weights("delta_net"), tokens(1, 5)
    state["lm_head.weight"] = state["model.embeddings.weight"]
    wanted = fla_model("delta_net", state, ids)
    del state["lm_head.weight"]
    model = ours("delta_net", state, tie_word_embeddings=True)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert_near(model(ids).logits, wanted)


def test_no_output_correction_is_no_d():
    values = {**FLA["comba"], "use_output_correction": False}
    state = {name: x for name, x in weights("comba").items() if not name.endswith(".D")}
    config = config_from_fla(values)
    model = ProteusForCausalLM(config).double()
    model.load_state_dict(from_fla(state, config))
    zero = {**state, **{f"model.layers.{i}.attn.D": torch.zeros(HEADS, dtype=torch.float64) for i in range(LAYERS)}}
    assert_near(model(tokens(1, T)).logits, fla_model("comba", zero, tokens(1, T)))


def test_sizes_of_flas_published_configurations_are_read():
    """fla-hub's retnet of 1.3B: hidden 2048, 8 heads, K = 256, V = 512; MLP 256 ceil(2/3 * 2 * 2048 / 256) = 2816."""
    values = {"model_type": "retnet", "hidden_size": 2048, "num_heads": 8, "expand_k": 1.0, "expand_v": 2.0, "hidden_ratio": 2}
    config = config_from_fla({**values, "num_hidden_layers": 24, "vocab_size": 32000, "norm_eps": 1e-6, "eos_token_id": 2})
    assert (config.head_dim, config.value_expansion, config.intermediate_size, config.eos_token_id) == (256, 2, 2816, 2)
    assert config.memory_blocks == 1


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("retnet", {"model_type": "gla"}, ["'gla'", "retnet, delta_net"]),
        ("retnet", {"num_kv_heads": 1}, ["num_kv_heads is 1", "num_heads 2"]),
        ("retnet", {"feature_map": "relu"}, ["feature_map is 'relu'"]),
        ("retnet", {"expand_v": 1.3}, ["expand_v"]),
        ("retnet", {"attn": {"layers": [1]}}, ["attn is"]),
        ("delta_net", {"use_gate": True}, ["use_gate is True", "False"]),
        ("delta_net", {"allow_neg_eigval": True}, ["allow_neg_eigval"]),
        ("gated_deltanet", {"output_gate_activation": "sigmoid"}, ["output_gate_activation", "'swish' or 'silu'"]),
        ("gated_deltanet", {"num_v_heads": 4}, ["num_v_heads is 4"]),
        ("comba", {"use_inner_decay": False}, ["use_inner_decay"]),
    ],
)
def test_models_that_ours_cannot_be_are_refused_in_words(kind, changes, words):
    with pytest.raises(ValueError) as error:
        config_from_fla({**FLA[kind], **changes})
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_configuration_without_its_sizes_is_refused():
    with pytest.raises(ValueError, match="hidden_size"):
        config_from_fla({"model_type": "comba"})


def test_weights_that_do_not_fit_the_configuration_are_refused():
    state, config = weights("comba"), config_from_fla(FLA["comba"])
    with pytest.raises(ValueError, match=r"1 of these weights .* model\.layers\.0\.attn\.q_conv1d\.bias"):
        from_fla({**state, "model.layers.0.attn.q_conv1d.bias": torch.zeros(12)}, config)
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.attn\.decay' is not among"):
        from_fla({name: x for name, x in state.items() if name != "model.layers.1.attn.decay"}, config)
    with pytest.raises(ValueError, match="before_norm"):
        from_fla(state, config_from_fla(FLA["comba"], inner_decay="after_norm"))
    with pytest.raises(ValueError, match="'titans'"):
        from_fla(state, ProteusConfig())
    with pytest.raises(ValueError, match="16 rows; 2 heads of head_dim 4 need 8"):
        from_fla(weights("retnet"), config_from_fla(FLA["retnet"], head_dim=4))
