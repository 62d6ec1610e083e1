"""A run in progress: its steps, and what is measured, written and saved after each."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proteus_lm.cache import ProteusCache
from proteus_lm.data.dataset import TokenDataset
from proteus_lm.data.loader import Batch, Loader
from proteus_lm.data.tokenizer import Tokenizer
from proteus_lm.evals.perplexity import evaluate
from proteus_lm.model import ProteusForCausalLM
from proteus_lm.optim import GatedAdamW
from proteus_lm.train.checkpoint import Progress, save_checkpoint
from proteus_lm.train.metrics import Metrics, Screen, perplexity
from proteus_lm.train.optimizer import Groups, learning_rate, set_learning_rate
from proteus_lm.train.ranks import Ranks
from proteus_lm.train.recipe import Recipe
from proteus_lm.train.signals import TrainingInterrupted, watch
from proteus_lm.train.step import NonFiniteError, Piece, forward_backward, report_nonfinite


@dataclass
class Trainer:
    """What a run moves (`progress`, weights, moments) and what it moves with; `proteus_lm.train.loop` puts it together.

    Args:
        model: fp32 weights on the device. piece: its forward and backward.
        micro: rows of a micro-batch. probe: int64 (1, T) on the device, the window on which the memory is measured.
        metrics: None in every process but the first.
    """

    recipe: Recipe
    out: Path
    ranks: Ranks
    model: ProteusForCausalLM
    piece: Piece
    optimizer: torch.optim.Optimizer
    groups: Groups
    loader: Loader
    micro: int
    probe: Tensor
    validation: TokenDataset | None
    validation_context: int
    tokenizer: Tokenizer
    about: dict[str, Any]
    screen: Screen
    progress: Progress = field(default_factory=Progress)
    metrics: Metrics | None = None
    _since: float = field(default=0.0, init=False)
    _tokens_since: int = field(default=0, init=False)

    def end(self, stop_at: int | None) -> int:
        """The step at which `go(stop_at)` ends."""
        return self.recipe.train.steps if stop_at is None else min(stop_at, self.recipe.train.steps)

    def go(self, stop_at: int | None) -> None:
        """Steps until the recipe's end, `stop_at` or a signal; the last one is saved whatever `save_every` says."""
        options, progress, end = self.recipe.train, self.progress, self.end(stop_at)
        if progress.step >= end:
            self.screen.say(f"nothing to do: the run is at step {progress.step} of {options.steps}; its files stay as they are")
        self.model.train()
        self._since, self._tokens_since = time.perf_counter(), 0
        with watch() as signals:
            while progress.step < end:
                record = self._step()
                signal_number = int(self.ranks.total(signals.received if self.ranks.first else 0))
                self._after_step(record, leaving=progress.step == end or signal_number != 0)
                if signal_number and progress.step < options.steps:
                    message = (
                        f"stopped by signal {signal_number} after step {progress.step}, which is saved; the same command continues"
                    )
                    self.screen.say(message)
                    raise TrainingInterrupted(signal_number, message)
        if progress.skipped:
            self.screen.say(f"{progress.skipped} updates were left out because their loss or gradient was not finite")

    def _step(self) -> dict[str, Any]:
        """One optimiser step; its record. Raises NonFiniteError before the update."""
        options, progress = self.recipe.train, self.progress
        step = progress.step + 1
        batch = self.loader.batch(step - 1)
        rate = learning_rate(options, step)
        set_learning_rate(self.optimizer, rate)
        loss, predictions = forward_backward(
            self.piece,
            list(self.model.parameters()),
            batch,
            positions=self.model.config.positions,
            rows=self.micro,
            ranks=self.ranks,
        )
        if step == 1:
            self._say_untrained()
        if isinstance(self.optimizer, GatedAdamW):
            self.optimizer.mask_gradients()  # before clipping: locked units must not use up the norm
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        loss_value, norm_value = torch.stack([loss, norm.to(loss)]).tolist()
        if math.isfinite(loss_value) and math.isfinite(norm_value):
            if options.clip is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, options.clip, norm)
            self.optimizer.step()
        else:
            self._nonfinite(step, batch, loss_value, norm_value)
        self.optimizer.zero_grad(set_to_none=not options.cuda_graph)
        progress.step, progress.tokens = step, progress.tokens + predictions
        self._tokens_since += predictions
        record = {"step": step, "loss": loss_value, "perplexity": perplexity(loss_value), "lr": rate, "gradient_norm": norm_value}
        record |= {"tokens": progress.tokens}
        return record | ({"skipped": progress.skipped} if progress.skipped else {})

    def _say_untrained(self) -> None:
        """Name the parameters that the first loss does not depend on: they would stay as they are in silence."""
        names = [name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        if names:
            self.screen.say(f"warning: the loss does not depend on {', '.join(names)}")

    def _nonfinite(self, step: int, batch: Batch, loss: float, norm: float) -> None:
        """Save the batch; then count the update as left out, or save the run as it stands and stop."""
        said = report_nonfinite(self.out, step, batch, self.model, loss, norm, self.ranks.rank)
        self.ranks.wait()
        if self.recipe.train.skip_nonfinite:
            self.progress.skipped += 1
            self.screen.say(f"left out an update: {said}")
            return
        self._save(keep=None)
        raise NonFiniteError(
            f"stopped before the update. {said}. The weights of step {self.progress.step} are saved; lower train.lr, lengthen "
            "train.warmup, or set train.skip_nonfinite=true to leave such updates out"
        )

    def _after_step(self, record: dict[str, Any], *, leaving: bool) -> None:
        """Measure, validate, report and save, each when it is due; `leaving` saves in any case."""
        options, step = self.recipe.train, self.progress.step
        due = {name: step == options.steps or (every and step % every == 0) for name, every in self._periods().items()}
        try:
            if due["log"]:
                record |= self._measure()
            if due["validate"] and self.validation is not None:
                record |= self._validate()
            if self.metrics is not None:
                self.metrics.write(record)
        except Exception:
            self._save(keep=options.keep)  # the step is done: a failure to look at it must not lose it
            raise
        self.screen.step(record, line=bool(due["log"]))
        if due["save"] or leaving:
            self._save(keep=options.keep)
        if due["log"] or due["validate"] or due["save"]:
            self._since, self._tokens_since = time.perf_counter(), 0

    def _periods(self) -> dict[str, int | None]:
        options = self.recipe.train
        return {"log": options.log_every, "validate": options.validate_every, "save": options.save_every}

    def _measure(self) -> dict[str, Any]:
        """Speed since the last measurement, memory norms and inner gradients on one fixed window, peak memory on CUDA."""
        seconds = time.perf_counter() - self._since
        found: dict[str, Any] = {"tokens_per_second": self._tokens_since / seconds}
        if self.ranks.device.type == "cuda":
            found["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.ranks.device)
        self.model.eval()
        with torch.no_grad(), self._autocast():
            cache = ProteusCache()
            # One token short of the window: a chunk that ends with it would leave no token to measure the inner gradient at.
            probe = self.probe[:, : max(1, self.probe.shape[1] - 1)]
            self.model(input_ids=probe, past_key_values=cache, use_cache=True, logits_to_keep=1)
            found["memory_norm"] = self.model.memory_norms(cache).mean(1).tolist()
            found["inner_gradient_norm"] = self.model.surprises(cache).mean(1).tolist()
        self.model.train()
        return found

    def _validate(self) -> dict[str, Any]:
        """Loss on the validation split; the first process looks, the others wait."""
        found: dict[str, Any] = {}
        if self.ranks.first and self.validation is not None:
            with self._autocast():
                result = evaluate(
                    self.model,
                    self.validation,
                    context=self.validation_context,
                    batch_size=self.micro,
                    max_tokens=self.recipe.train.validate_tokens,
                )
            loss = result.whole.mean
            found = {"validation_loss": loss, "validation_perplexity": result.perplexity, "validation_tokens": result.whole.tokens}
        self.ranks.wait()
        return found

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.ranks.device.type, dtype=torch.bfloat16, enabled=self.recipe.train.precision == "bf16")

    def _save(self, *, keep: int | None) -> None:
        if self.metrics is not None:
            self.metrics.sync()
            save_checkpoint(
                self.out, self.progress, self.model, self.optimizer, self.groups, self.tokenizer, keep=keep, about=self.about
            )
        self.ranks.wait()
