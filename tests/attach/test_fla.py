"""flash-linear-attention's layers under the schedule.

Its kernels need a GPU. Here its layers (where it is installed), and layers shaped as they are, call the literal memory instead;
the last tests run its kernels.
"""

from __future__ import annotations

import copy
import importlib
from types import ModuleType

import pytest
import torch
from torch import nn

from proteus_lm import ActivationSchedule
from proteus_lm.attach import attach, detach
from tests.attach.foreign import build, in_calls, reference_rule, with_reference
from tests.attach.memory import BLOCKS, CONTEXT, close, literal, tokens, unit


def rows_of(x, cu_seqlens):
    """A batch, or the documents packed in one row, as a list of batches that each have their own state."""
    return [x] if cu_seqlens is None else [x[:, a:b] for a, b in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:])]


def fla_rule(name, gate=None, axis="key", norm_order="norm_then_mask"):
    """What fla's functions compute, one token at a time, and with `gate` (a schedule) what they shall compute from 0 on."""

    def rule(q, k, v, g=None, gk=None, beta=None, p=None, **options):
        state, cu_seqlens = options.get("initial_state"), options.get("cu_seqlens")
        assert gate is None or state is None
        if "retention" in name:  # rotary pairs (i, i + K/2) side by side: a block is made of whole pairs
            q, k = (x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for x in (q, k))
            g = (1 - 2.0 ** (-5.0 - torch.arange(k.shape[2]))).log().expand(k.shape[:3])
        if options.get("use_gate_in_kernel"):
            g = -options["A_log"].exp() * nn.functional.softplus(g + options["dt_bias"])
        if options.get("use_beta_sigmoid_in_kernel"):
            beta = beta.sigmoid()
        decay = gk if gk is not None else g if g is not None else torch.zeros(k.shape[:3])
        decay = (decay if decay.dim() == 4 else decay[..., None]).exp()
        p = torch.zeros_like(k) if p is None else p
        dim = k.shape[-1] if axis == "key" else v.shape[-1]
        outputs, states = [], []
        parts = [rows_of(x, cu_seqlens) for x in (q, k, v, decay, beta if beta is not None else k, p)]
        for i, (q_, k_, v_, decay_, beta_, p_) in enumerate(zip(*parts)):
            active = (
                torch.full(k_.shape[:2], dim) if gate is None else gate.active(dim, torch.arange(k_.shape[1])).expand(k_.shape[:2])
            )
            if norm_order == "mask_then_norm":
                q_, k_, p_ = (torch.where(torch.arange(dim) < active[..., None, None], x, 0) for x in (q_, k_, p_))
            if options.get("use_qk_l2norm_in_kernel"):
                q_, k_, p_ = unit(q_), unit(k_), unit(p_)
            if state is None:
                start = torch.zeros(len(k_), k.shape[2], k.shape[-1], v.shape[-1])
            else:
                start = state if cu_seqlens is None else state[i : i + 1]
                start = start.mT if options.get("state_v_first") else start
            reader = p_ if "comba" in name else "decayed"
            out, end = literal(q_, k_, v_, decay_, None if beta is None else beta_, reader, active, axis, start)
            outputs.append(out)
            states.append(end.mT if options.get("state_v_first") else end)
        return torch.cat(outputs, 1), torch.cat(states) if options.get("output_final_state") else None

    return rule


class PlainConv(nn.Module):
    """In place of fla's ShortConvolution: the activation alone, so that no state is needed."""

    def forward(self, x, **_):
        return torch.nn.functional.silu(x), None


class PlainNorm(nn.Module):
    """In place of fla's norms, gated or not."""

    def forward(self, x, gate=None):
        x = torch.nn.functional.rms_norm(x, x.shape[-1:])
        return x if gate is None else x * gate.sigmoid()


class PlainRotary(nn.Module):
    """In place of fla's rotary positions: none (the gate only needs to know that there are pairs)."""

    interleaved = False

    def forward(self, q, k, **_):
        return q, k


LAYER = """
import torch
from torch import nn

class {name}(nn.Module):
    # Shaped as fla's layers: padding taken out into cu_seqlens, the rule looked up by name, states kept in the cache's dictionary.
    def __init__(self, hidden_size, head_dim, num_heads, layer_idx):
        super().__init__()
        self.head_k_dim, self.head_v_dim, self.layer_idx, self.mode = head_dim, 2 * head_dim, layer_idx, "chunk"
        self.q_proj, self.k_proj = (nn.Linear(hidden_size, num_heads * head_dim, bias=False) for _ in range(2))
        self.v_proj = nn.Linear(hidden_size, num_heads * 2 * head_dim, bias=False)
        self.gk_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.a_proj, self.b_proj = (nn.Linear(hidden_size, num_heads, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(num_heads * 2 * head_dim, hidden_size, bias=False)
        self.o_norm = self.rotary = None

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False, output_attentions=False, **kwargs):
        batch, q_len, _ = hidden_states.shape
        mode = "chunk" if torch.is_grad_enabled() else "fused_recurrent" if q_len <= 64 else self.mode
        last = past_key_values[self.layer_idx] if past_key_values is not None and len(past_key_values) > self.layer_idx else None
        cu_seqlens, mask = kwargs.get("cu_seqlens"), None
        if cu_seqlens is None and attention_mask is not None:
            mask = attention_mask[:, -q_len:].bool()
            cu_seqlens = torch.nn.functional.pad(mask.sum(-1).cumsum(0), (1, 0))
            hidden_states = hidden_states[mask][None]
        q, k = (f(hidden_states).unflatten(-1, (-1, self.head_k_dim)) for f in (self.q_proj, self.k_proj))
        v = self.v_proj(hidden_states).unflatten(-1, (-1, self.head_v_dim))
        q, k = self.rotary(q, k) if self.rotary else (nn.functional.silu(q), nn.functional.silu(k))
        g, beta = nn.functional.logsigmoid(self.a_proj(hidden_states) + 3), self.b_proj(hidden_states).sigmoid()
        gk = nn.functional.logsigmoid(self.gk_proj(hidden_states) + 3).unflatten(-1, (-1, self.head_k_dim))
        common = dict(
            initial_state=None if last is None else last["recurrent_state"], output_final_state=use_cache, cu_seqlens=cu_seqlens
        )
        if mode == "chunk":
            o, state = {chunk}(q=q, k=k, v=v, **common{arguments})
        else:
            o, state = {recurrent}(q=q, k=k, v=v, **common{arguments})
        if past_key_values is not None:
            past_key_values.update(recurrent_state=state, layer_idx=self.layer_idx, offset=q_len)
        o = self.o_proj(self.o_norm(o).flatten(-2))
        if mask is not None:
            padded = o.new_zeros(batch, q_len, o.shape[-1])
            padded[mask] = o[0]
            o = padded
        return o, None, past_key_values
"""
NORM = ", use_qk_l2norm_in_kernel=True"
FLA = {  # class: fla's module, its rules, the arguments of the stand-in's call
    "Comba": ("comba", "chunk_comba", "fused_recurrent_comba", ", p=0.7 * k, g=g, beta=beta" + NORM),
    "DeltaNet": ("delta_net", "chunk_delta_rule", "fused_recurrent_delta_rule", ", beta=beta" + NORM),
    "GatedDeltaNet": ("gated_deltanet", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", ", g=g, beta=beta" + NORM),
    "GatedLinearAttention": ("gla", "chunk_gla", "fused_recurrent_gla", ", g=gk"),
    "MultiScaleRetention": ("multiscale_retention", "chunk_retention", "fused_recurrent_retention", ""),
}
REST = ("fused_chunk_retention", "parallel_retention")


class StandInCache:
    """Shaped as fla's: a dictionary of states a layer, whose tensors all follow a reordering."""

    def __init__(self):
        self.states = []

    def __getitem__(self, index):
        return self.states[index]

    def __len__(self):
        return len(self.states)

    def update(self, recurrent_state, layer_idx, **_):
        while len(self.states) <= layer_idx:
            self.states.append({"recurrent_state": None, "conv_state": None})
        self.states[layer_idx]["recurrent_state"] = recurrent_state

    def reorder_cache(self, beam_idx):
        self.states = [{k: x if x is None else x[beam_idx] for k, x in state.items()} for state in self.states]


def stand_in(name):
    file, chunk, recurrent, arguments = FLA[name]
    module = ModuleType(f"fla.layers.{file}")
    source = LAYER.format(name=name, chunk=chunk, recurrent=recurrent, arguments=arguments)
    if name == "MultiScaleRetention":  # all its rules stand in one forward; two of them are never reached here
        source += "".join(f"        {rule}\n" for rule in REST)
    exec(source, vars(module))
    return module, getattr(module, name)(32, 16, 2, layer_idx=0), StandInCache


def real(name):
    fla = pytest.importorskip("fla", reason="flash-linear-attention is not installed; the stand-ins shaped as its layers run")
    module = importlib.import_module(f"fla.layers.{FLA[name][0]}")
    head = {"head_dim": 16} if name in ("Comba", "GatedDeltaNet") else {}
    assert fla
    layer = getattr(module, name)(hidden_size=32, num_heads=2, layer_idx=0, **head)
    return module, layer, importlib.import_module("fla.models.cache_utils").Cache


@pytest.fixture(params=["stand-in", "fla"])
def fla_layer(request, monkeypatch):
    """name, gate -> (a layer whose rules are the literal memory, its cache's class)."""

    def make(name, gate=None, **options):
        torch.manual_seed(0)
        module, layer, cache = (stand_in if request.param == "stand-in" else real)(name)
        for child, _ in list(layer.named_children()):
            if child.endswith("conv1d"):
                setattr(layer, child, PlainConv())
            elif "norm" in child:
                setattr(layer, child, PlainNorm())
        if hasattr(layer, "_use_fused_qkv_conv"):
            layer._use_fused_qkv_conv = lambda **_: False
        layer.o_norm = PlainNorm()
        if name == "MultiScaleRetention":
            layer.rotary = PlainRotary()
        for rule in (*FLA[name][1:3], *REST):
            monkeypatch.setattr(module, rule, fla_rule(rule, gate, **options), raising=False)
        return layer.eval(), cache

    return make


@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("axis, norm_order", [("key", "norm_then_mask"), ("key", "mask_then_norm"), ("value", "norm_then_mask")])
@pytest.mark.parametrize("name", FLA)
def test_fla_layer_computes_the_literal_gated_memory(fla_layer, name, axis, norm_order, gradients):
    layer, _ = fla_layer(name)
    if norm_order == "mask_then_norm" and name in ("GatedLinearAttention", "MultiScaleRetention"):
        with pytest.raises(ValueError, match="does not normalise keys"):
            attach(layer, BLOCKS, CONTEXT, norm_order=norm_order)
        return
    hidden, mask = torch.randn(2, 30, 32), torch.ones(2, 30, dtype=torch.int64)
    mask[1, :13] = 0
    with torch.set_grad_enabled(gradients):
        base = layer(hidden, attention_mask=mask)[0]
        want = fla_layer(name, ActivationSchedule(BLOCKS, CONTEXT), axis=axis, norm_order=norm_order)[0](
            hidden, attention_mask=mask
        )[0]
        layer, _ = fla_layer(name)
        got = attach(layer, BLOCKS, CONTEXT, axis=axis, norm_order=norm_order)(hidden, attention_mask=mask)[0]
    close(got, want)
    assert (got - base).abs().max() > 1e-4


@pytest.mark.parametrize("name", FLA)
def test_fla_layer_with_a_cache_equals_one_call(fla_layer, name):
    """Prompt and steps of a padded batch, steps with and without the mask, then rows in another order."""
    layer, cache = fla_layer(name)
    cache, layer = cache(), attach(layer, BLOCKS, CONTEXT)
    hidden, mask = torch.randn(2, 31, 32), torch.ones(2, 31, dtype=torch.int64)
    mask[1, :13] = 0
    with torch.no_grad():
        want = layer(hidden, attention_mask=mask)[0]
        outputs = [layer(hidden[:, :20], attention_mask=mask[:, :20], past_key_values=cache, use_cache=True)[0]]
        outputs += [layer(hidden[:, 20:27], attention_mask=mask[:, :27], past_key_values=cache, use_cache=True)[0]]
        outputs += [layer(hidden[:, t : t + 1], past_key_values=cache, use_cache=True)[0] for t in (27, 28)]
        outputs += [layer(hidden[:, 29:30], attention_mask=mask[:, :30], past_key_values=cache, use_cache=True)[0]]
        close(torch.cat(outputs, 1), want[:, :30])
        cache.reorder_cache(torch.tensor([1, 0]))
        close(layer(hidden[[1, 0], 30:], past_key_values=cache, use_cache=True)[0], want[[1, 0], 30:])


@pytest.mark.parametrize("name", FLA)
def test_fla_layer_starts_anew_at_each_packed_document(fla_layer, name):
    layer, cache = fla_layer(name)
    attach(layer, BLOCKS, CONTEXT)
    first, second = torch.randn(1, 9, 32), torch.randn(1, 20, 32)
    with torch.no_grad():
        got = layer(torch.cat((first, second), 1), cu_seqlens=torch.tensor([0, 9, 29]))[0]
        close(got, torch.cat((layer(first)[0], layer(second)[0]), 1))
        cache = cache()
        layer(
            torch.cat((first[:, :4], second[:, :12]), 1), cu_seqlens=torch.tensor([0, 4, 16]), past_key_values=cache, use_cache=True
        )
        rest = torch.cat((first[:, 4:], second[:, 12:]), 1)
        after = layer(rest, cu_seqlens=torch.tensor([0, 5, 13]), past_key_values=cache, use_cache=True)[0]
        close(after, torch.cat((got[:, 4:9], got[:, 9 + 12 :]), 1))


def test_fla_layer_that_is_not_attached_is_left_alone(fla_layer):
    layer, _ = fla_layer("Comba")
    hidden = torch.randn(1, 20, 32)
    with torch.no_grad():
        base = layer(hidden)[0]
        gated = attach(copy.deepcopy(layer), BLOCKS, CONTEXT)
        assert not torch.equal(gated(hidden)[0], base)
        assert torch.equal(layer(hidden)[0], base)
        with pytest.raises(RuntimeError):
            gated(hidden[..., :31])
        assert torch.equal(layer(hidden)[0], base)
        assert torch.equal(detach(gated)(hidden)[0], base)


def test_fla_cache_filled_before_attaching_raises(fla_layer):
    layer, cache = fla_layer("DeltaNet")
    cache = cache()
    with torch.no_grad():
        layer(torch.randn(1, 5, 32), past_key_values=cache, use_cache=True)
        attach(layer, BLOCKS, CONTEXT)
        with pytest.raises(ValueError, match="filled before"):
            layer(torch.randn(1, 5, 32), past_key_values=cache, use_cache=True)


def test_blocks_that_cut_a_rotary_pair_raise(fla_layer):
    layer, _ = fla_layer("MultiScaleRetention")
    with pytest.raises(ValueError, match=r"blocks of 1 of 16 coordinates cut a pair"):
        attach(layer, 16, 64)
    attach(layer, 16, 64, axis="value")


def test_a_class_of_the_same_name_elsewhere_is_not_taken_for_flas():
    class DeltaNet(nn.Module):
        def forward(self, hidden_states):
            return hidden_states

    with pytest.raises(ValueError, match="no layer of this model can be gated"):
        attach(DeltaNet(), 4, 24)


# Its kernels


@pytest.fixture
def kernels(monkeypatch):
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    if not torch.cuda.is_available():
        pytest.skip("its kernels need a CUDA device")
    # With Triton 3.4 to 3.7.0 on Hopper fla refuses its gated backward. What is compared here says whether it was right.
    guarded = importlib.import_module("fla.ops.common.chunk_o")
    monkeypatch.setattr(guarded, "TRITON_ABOVE_3_7_1", True, raising=False)


def rounded(got, want):
    """bf16: eight bits in every product of the kernels, 1e-2 as in design.md, and the layer's own maps around them."""
    close(got.float(), want.float(), 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("axis", ["key", "value"])
@pytest.mark.parametrize("name", FLA)
def test_kernels_under_the_gate_compute_the_literal_gated_memory(kernels, monkeypatch, name, axis):
    """Whole against the literal memory with its gradient, then in calls with a cache; padded, longer than 64 tokens."""
    torch.manual_seed(0)
    module = importlib.import_module(f"fla.layers.{FLA[name][0]}")
    head = {"head_dim": 64} if name in ("Comba", "GatedDeltaNet") else {}
    layer = getattr(module, name)(hidden_size=128, num_heads=2, layer_idx=0, **head).to("cuda", torch.bfloat16)
    hidden = torch.randn(2, 150, 128).to("cuda", torch.bfloat16)
    mask = torch.ones(2, 150, dtype=torch.int64, device="cuda")
    mask[1, :61] = 0

    def whole(layer):
        out = layer(hidden, attention_mask=mask)[0]
        return out.detach(), torch.autograd.grad(out.float().square().sum(), layer.k_proj.weight)[0]

    base, _ = whole(layer)
    gated = attach(copy.deepcopy(layer), BLOCKS, 100, axis=axis)
    got, gradient = whole(gated)
    with monkeypatch.context() as patch, torch.device("cuda"):
        for rule in (*FLA[name][1:3], *REST):
            patch.setattr(module, rule, in_fp32(fla_rule(rule, ActivationSchedule(BLOCKS, 100), axis=axis)), raising=False)
        want, want_gradient = whole(layer)
    rounded(got, want)
    close(gradient.float(), want_gradient.float(), 5e-2)  # of a product of two rounded passes
    assert (got - base).float().abs().max() > 0.05 * base.float().abs().max()
    cache = importlib.import_module("fla.models.cache_utils").Cache()
    with torch.no_grad():
        ends = [100, 149, 150]
        parts = [
            gated.eval()(hidden[:, a:b], attention_mask=mask[:, :b], past_key_values=cache, use_cache=True)[0]
            for a, b in zip([0, *ends], ends)
        ]
    rounded(torch.cat(parts, 1), want)


def in_fp32(rule):
    """A rule on inputs widened to fp32, its output in v's type: the literal memory has no rounding of its own."""

    def wide(q, k, v, **options):
        options = {n: x.float() if torch.is_tensor(x) and x.is_floating_point() else x for n, x in options.items()}
        out, state = rule(q.float(), k.float(), v.float(), **options)
        return out.to(v.dtype), state

    return wide


@pytest.mark.gpu
def test_transformers_with_flas_kernels_computes_the_literal_gated_memory(kernels, monkeypatch):
    """Qwen3-Next takes fla's functions where they are installed, by other names for their arguments."""
    model, ids = build().cuda(), tokens(2, 90).cuda()
    with torch.no_grad():
        got = attach(build().cuda(), BLOCKS, CONTEXT)(ids).logits
        with monkeypatch.context() as patch, torch.device("cuda"):
            with_reference(patch, "Qwen3Next", reference_rule(ActivationSchedule(BLOCKS, CONTEXT)))
            want = model(ids).logits
        rounded(got, want)
        parts, _ = in_calls(attach(build().cuda(), BLOCKS, CONTEXT), ids, [40, *[1] * 50])
    rounded(parts, want)
