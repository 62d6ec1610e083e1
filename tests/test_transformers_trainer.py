"""transformers' own Trainer: micro-batches of unlike sizes, accumulated, train as one batch does, with logits and without."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer, TrainingArguments

from proteus_lm import ProteusConfig, ProteusForCausalLM

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
FIELDS = {"vocab_size": 31, "hidden_size": 16, "num_heads": 2, "head_dim": 8, "num_hidden_layers": 1, "mixer": "comba"}


class WithoutLogits(ProteusForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs, skip_logits=True)


def trained(kind, folder, rows, micro_batches):
    """All weights after two steps of SGD on the same eight rows, of which each scores another number of tokens."""
    torch.manual_seed(0)
    model = kind(ProteusConfig(**FIELDS))
    ids = torch.randint(0, 31, (8, 12), generator=torch.Generator().manual_seed(1))
    labels = torch.stack([torch.where(torch.arange(12) < 2 + i, row, -100) for i, row in enumerate(ids)])
    data = [{"input_ids": a, "labels": b} for a, b in zip(ids, labels)]
    options = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": micro_batches, "max_steps": 2, "optim": "sgd"}
    options |= {
        "learning_rate": 0.5,
        "max_grad_norm": 1e9,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    Trainer(model, TrainingArguments(str(folder), **options), train_dataset=data).train()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("kind", [ProteusForCausalLM, WithoutLogits])
def test_accumulated_micro_batches_train_as_one_batch(kind, tmp_path):
    one, four = (trained(kind, tmp_path, rows, count) for rows, count in ((8, 1), (2, 4)))
    assert (one - four).norm() <= 1e-5 * one.norm()


def test_it_evaluates_with_a_loss_and_keeps_the_best_model(tmp_path):
    ids = torch.randint(0, 31, (8, 12), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in ids]
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 2, "load_best_model_at_end": True}
    given = TrainingArguments(str(tmp_path), **often, report_to=[], use_cpu=True, disable_tqdm=True)
    model = ProteusForCausalLM(ProteusConfig(**FIELDS))
    trainer = Trainer(model, given, train_dataset=data, eval_dataset=data)
    assert trainer.label_names == ["labels"]
    trainer.train()
    with torch.no_grad():
        assert trainer.evaluate()["eval_loss"] == pytest.approx(model(ids, labels=ids).loss.item(), abs=1e-5)
