"""One optimiser step's forward and backward passes: micro-batches, loss normalised by tokens, and what to do with bad numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from proteus_lm.data.loader import Batch, cu_seqlens
from proteus_lm.ops.cross_entropy import IGNORED
from proteus_lm.run import NONFINITE
from proteus_lm.train.ranks import Ranks


class NonFiniteError(FloatingPointError):
    """A loss or gradient that is not finite: the update was not made."""


@dataclass(frozen=True)
class Inputs:
    """What a model is given: ids (rows, T) and targets of the same shape; packed documents in one row with their boundaries."""

    ids: Tensor
    targets: Tensor
    boundaries: Tensor | None

    @property
    def predictions(self) -> int:
        """Targets that count."""
        return int((self.targets != IGNORED).sum())


def make_inputs(batch: Batch, *, positions: str, first: int, last: int) -> Inputs:
    """Rows first .. last - 1 of a batch, on the CPU.

    Args:
        positions: "window" = a row is one sequence; "document" = rows are packed in one with a boundary at every document's start,
            and the first token of a document is not predicted from the document before it.
    """
    tokens, starts = batch.tokens[first:last], batch.starts[first:last]
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    if positions == "window":
        return Inputs(ids, targets, None)
    targets = targets.masked_fill(starts[:, 1:], IGNORED)
    return Inputs(ids.reshape(1, -1), targets.reshape(1, -1), cu_seqlens(starts))


def micro_batches(batch: Batch, *, positions: str, rows: int) -> Iterator[Inputs]:
    """A batch in pieces of `rows` rows."""
    for first in range(0, len(batch.tokens), rows):
        yield make_inputs(batch, positions=positions, first=first, last=first + rows)


class Piece:
    """Forward and backward of micro-batches: gradients are added up in `.grad`.

    Args:
        forward: the model, or what torch.compile made of it.
        precision: fp32 | bf16 (autocast).
    """

    def __init__(self, forward: Callable[..., Any], precision: str, device: torch.device) -> None:
        self.forward, self.precision, self.device = forward, precision, device

    def __call__(self, piece: Inputs, predictions: int) -> Tensor:
        """Sum of the losses of a micro-batch over `predictions`, nats, fp32 () on the device."""
        boundaries = None if piece.boundaries is None else piece.boundaries.to(self.device)
        return self.run(piece.ids.to(self.device), piece.targets.to(self.device), boundaries, predictions)

    def run(self, ids: Tensor, targets: Tensor, boundaries: Tensor | None, predictions: int) -> Tensor:
        """The same, of tensors on the device."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16"):
            # Divided outside: a compiled forward would be compiled anew for another number.
            given = {"shift_labels": targets, "num_items_in_batch": 1, "skip_logits": True}
            loss = self.forward(input_ids=ids, cu_seqlens=boundaries, use_cache=False, **given).loss / predictions
        loss.backward()
        return loss.detach()


def forward_backward(
    run: Callable[[Inputs, int], Tensor],
    parameters: Sequence[nn.Parameter],
    batch: Batch,
    *,
    positions: str,
    rows: int,
    ranks: Ranks,
) -> tuple[Tensor, int]:
    """Gradients of the mean loss over all predictions of all processes, added up in `.grad` over micro-batches.

    Args:
        run: of one micro-batch. parameters: the model's.
        rows: of one micro-batch.

    Returns:
        That loss, nats a token, fp32 () on the device, and the number of predictions.
    """
    pieces = list(micro_batches(batch, positions=positions, rows=rows))
    predictions = int(ranks.total(sum(piece.predictions for piece in pieces)))
    total = torch.zeros((), device=ranks.device)
    for piece in pieces:
        total += run(piece, predictions)
    gradients = [p.grad for p in parameters if p.grad is not None]
    ranks.sum_([*gradients, total])
    return total, predictions


def first_nonfinite(model: nn.Module) -> str | None:
    """Name of the first parameter, in the model's order, whose gradient is not finite."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return name
    return None


def report_nonfinite(run: Path, step: int, batch: Batch, model: nn.Module, loss: float, norm: float, rank: int) -> str:
    """Save the batch and what was seen of it under RUN/nonfinite, and say it in one sentence.

    Writes step-XXXXXXXX-rank-R.safetensors (tokens int64 (rows, context + 1), starts uint8) and the same name .json.
    """
    name = first_nonfinite(model)
    facts: dict[str, Any] = {"step": step, "loss": str(loss), "gradient_norm": str(norm), "first_parameter": name}
    folder = run / NONFINITE
    folder.mkdir(exist_ok=True)
    stem = folder / f"step-{step:08d}-rank-{rank}"
    tensors = {"tokens": batch.tokens.contiguous(), "starts": batch.starts.to(torch.uint8).contiguous()}
    save_file(tensors, stem.with_suffix(".safetensors"), metadata={"step": str(step)})
    stem.with_suffix(".json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    where = f"the gradient of {name} is the first that is not finite" if name else "every gradient is finite, but their norm is not"
    return f"step {step}: loss {loss}, gradient norm {norm}; {where}; the batch is in {stem}.safetensors"
