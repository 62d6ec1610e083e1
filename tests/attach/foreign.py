"""Tiny models of transformers, their gated delta rule as a reference, and ways to run them."""

from __future__ import annotations

import importlib
import importlib.util

import torch
import transformers

from tests.attach.memory import KEYS, VALUES, VOCAB, literal, unit

LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": KEYS,
    "linear_value_head_dim": VALUES,
    "linear_conv_kernel_dim": 4,
}
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KIMI = {
    "linear_num_heads": 2,
    "linear_head_dim": KEYS,
    "linear_conv_kernel_dim": 4,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 2,
    "first_k_dense_replace": 3,
}
MOE = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MODELS = {
    "Qwen3Next": ("qwen3_next", "Qwen3NextConfig", dict(LINEAR, head_dim=16, num_experts=0)),
    "Qwen3_5": ("qwen3_5", "Qwen3_5TextConfig", dict(LINEAR, head_dim=16)),
    "Qwen3_5Moe": ("qwen3_5_moe", "Qwen3_5MoeTextConfig", {**LINEAR, **MOE}),
    "OlmoHybrid": ("olmo_hybrid", "OlmoHybridConfig", dict(LINEAR, linear_num_key_heads=4)),
    "KimiLinear": ("kimi_linear", "KimiLinearConfig", KIMI),
}


def build(name="Qwen3Next", seed=0):
    """A tiny random model in eval mode, with decays that leave something to remember."""
    _, config, options = MODELS[name]
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config)(**SMALL | options)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.fill_(-2.0)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model


def modeling(name):
    folder = MODELS[name][0]
    return importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")


def reference_rule(schedule, axis="key", norm_order="norm_then_mask", first=0):
    """transformers' (gated or per-channel) delta rule under the schedule, for rows whose first token stands at `first`."""

    def rule(query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, **_):
        assert initial_state is None and use_qk_l2norm_in_kernel
        heads = value.shape[2]
        query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
        dim = key.shape[-1] if axis == "key" else value.shape[-1]
        positions = torch.as_tensor(first).reshape(-1, 1) + torch.arange(query.shape[1])
        active = schedule.active(dim, positions).expand(len(query), -1)
        if norm_order == "mask_then_norm":
            mask = (torch.arange(dim) < active[..., None])[:, :, None]
            query, key = (torch.where(mask, x, 0) for x in (query, key))
        decay = g.exp() if g.dim() == 4 else g.exp()[..., None]
        state = torch.zeros(len(query), heads, key.shape[-1], value.shape[-1])
        out, state = literal(unit(query), unit(key), value, decay, beta, "decayed", active, axis, state)
        return out, state if output_final_state else None

    return rule


def with_reference(monkeypatch, name, rule):
    """The rule of an unattached model's module replaced for this test."""
    module = modeling(name)
    for attribute in vars(module).copy():
        if attribute.endswith(("chunk_gated_delta_rule", "recurrent_gated_delta_rule", "kimi_delta_attention")):
            monkeypatch.setattr(module, attribute, rule)


def run(model, ids, **options):
    """Logits, and the gradients of a loss, of one call without a cache."""
    model.zero_grad()
    logits = model(ids, use_cache=False, **options).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def cache_of(output):
    return output.cache if hasattr(output, "cache") else output.past_key_values


def in_calls(model, ids, lengths, **options):
    """Logits of a text given in calls of these lengths with one cache, and the cache."""
    cache, start, logits = None, 0, []
    for length in lengths:
        output = model(ids[:, start : start + length], past_key_values=cache, use_cache=True, **options)
        cache, start = cache_of(output), start + length
        logits.append(output.logits)
    return torch.cat(logits, 1), cache


def padded(prompts, length):
    ids = torch.zeros(len(prompts), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :], mask[row, length - len(prompt) :] = prompt, 1
    return ids, mask


def llama(**options):
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **options))


def use_torch(monkeypatch):
    """transformers' own PyTorch functions, also where fla and its kernels (which need a GPU) are installed."""
    ends = ("delta_rule", "delta_attention", "conv1d_fn", "conv1d_update")
    for module in map(modeling, MODELS if importlib.util.find_spec("fla") else ()):
        for attribute, function in vars(module).copy().items():
            function = getattr(function, "rule", function)  # behind a doorkeeper
            if attribute.endswith(ends) and hasattr(function, "__wrapped__"):
                monkeypatch.setattr(module, attribute, function.__wrapped__)
