"""Attention against its formula, written out."""

from __future__ import annotations

import pytest
import torch

from proteus_lm import ProteusConfig
from proteus_lm.mixers import AttentionMixer, attention
from proteus_lm.mixers.rotary import rotary_angles, rotate
from proteus_lm.sequence import TokenSequence
from tests.mixers.models import assert_near, make, options, tokens


def by_hand(mixer, x):
    length = x.shape[1]
    q, k, v = mixer.linear(x).unflatten(-1, (3, 2, 8)).unbind(2)
    angles = rotary_angles(torch.arange(length)[None], 8, torch.float64)[:, :, None]
    q, k = (rotate(part, (angles.cos(), angles.sin())) for part in (q, k))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
    apart = torch.arange(length)[:, None] - torch.arange(length)
    seen = (apart >= 0) & (apart < (mixer.window or length))
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    return mixer.out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(-2))


@pytest.mark.parametrize("window", [None, 1, 4, 50])
def test_attention_is_its_formula(window):
    mixer = make(options("attention", window=window)).layers[0].mixer
    x = torch.randn(2, 13, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y, _ = mixer(x, TokenSequence(ProteusConfig().schedule, 2, 13))
    assert_near(y, by_hand(mixer, x))


@pytest.mark.parametrize("form", ["attention", "mag"])
def test_a_window_makes_no_mask_of_all_pairs(form, monkeypatch):
    """At 32K tokens such a mask would take a gigabyte."""
    masks, read = [], attention.softmax_read
    monkeypatch.setattr(attention, "softmax_read", lambda *given: masks.append(given[3]) or read(*given))
    fields = {"titans_variant": "mag", "persistent_tokens": 3} if form == "mag" else {}
    model = make(options("titans" if form == "mag" else form, window=4, num_hidden_layers=1, **fields))
    model(tokens(2, 61))
    assert len(masks) == 2 and all(mask is None or mask.numel() <= 4 * (2 * 4 + 3) for mask in masks)


def test_a_window_forgets_exactly_and_decodes_past_three_windows_with_left_padding():
    model = make(options("attention", window=5, num_hidden_layers=1))
    ids = tokens(2, 4)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    text = model.generate(ids, attention_mask=mask, max_new_tokens=17, do_sample=False, pad_token_id=0)
    for row in range(2):
        alone = text[row : row + 1, 4 - int(mask[row].sum()) :]
        logits = model(alone, use_cache=False).logits
        start = int(mask[row].sum())
        assert torch.equal(logits[0, start - 1 : -1].argmax(-1), text[row, 4:])
    changed = text.clone()
    changed[:, 0] = (text[:, 0] + 1) % 31
    differs = (model(text).logits - model(changed).logits).abs().amax(-1) > 0
    assert differs[:, :5].all() and not differs[:, 5:].any()


def test_scores_are_counted_over_the_tokens_a_query_sees():
    config = ProteusConfig(**options("attention"))
    maps = 2 * 4 * 16 * 16
    assert AttentionMixer.flops_per_token(config, 10) == maps + 4 * 16 * 5.5
    config = ProteusConfig(**options("attention", window=4))
    assert AttentionMixer.flops_per_token(config, 10) == maps + 4 * 16 * (1 + 2 + 3 + 4 * 7) / 10
