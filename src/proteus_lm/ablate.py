"""One key of a recipe varied over values and seeds: runs that are trained once, a table with intervals over seeds, a figure.

Runs of one seed share first weights (where the key adds no parameter) and batches, so differences are paired by seed: what two runs
have in common does not blur them. Figure 3 of the paper is `model.memory_blocks` over 1, 8, 16, 32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from proteus_lm.data.dataset import TokenDataset
from proteus_lm.data.files import file_sha256, make_folder, write_json, write_text
from proteus_lm.evals import evaluate
from proteus_lm.evals.provenance import versions
from proteus_lm.evals.statistics import Estimate, over_seeds
from proteus_lm.evals.suite import Score, SuiteResult
from proteus_lm.report.figures import check_drawing
from proteus_lm.report.html import to_html
from proteus_lm.report.suite_figures import draw_ablation
from proteus_lm.report.suite_tables import ablation_table
from proteus_lm.report.tables import quote
from proteus_lm.run import EVALS, TRAINER, Run
from proteus_lm.train.checkpoint import about_checkpoint
from proteus_lm.train.loop import train
from proteus_lm.train.recipe import Recipe, RecipeError, load_recipe
from proteus_lm.train.setup import check_machine, fingerprint, open_inputs, other_data, validation_context

SUITE, VERSION = "fig3", "1"
MEASURED = "ablation.json"
_NO_MATTER = ("device", "threads", "log_every", "tensorboard", "wandb", "keep", "save_every", "validate_every", "validate_tokens")
"""Fields of a recipe that do not change what is learnt."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Ablation:
    """What is varied.

    Args:
        recipe: YAML file.
        key: "section.name", such as "model.memory_blocks".
        values: as a recipe would write them; the first is what the others are compared with.
        seeds: of `train.seed`, each value once with each.
        overrides: further fields, "section.key=value" each.
        max_tokens: predictions of each validation; None for the whole split.
        context: windows of the validation in training contexts.

    Raises:
        RecipeError: before any work, for a recipe that one of the combinations makes impossible; its message is `load_recipe`'s.
        ValueError: for no or repeated values or seeds, a key that is set twice, or a size below 1.
    """

    recipe: Path
    key: str
    values: tuple[Any, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    overrides: tuple[str, ...] = ()
    max_tokens: int | None = 65536
    context: int = 1

    def __post_init__(self) -> None:
        for name in ("values", "seeds"):
            found = getattr(self, name)
            if not found or len({_text(v) for v in found}) < len(found):
                raise ValueError(f"{name} are {', '.join(map(_text, found)) or 'none'}; give at least one, each once")
        if self.key == "train.seed":
            raise ValueError("train.seed cannot be the key: seeds are what the intervals are over; give them as --seeds")
        if any(item.partition("=")[0].strip() in (self.key, "train.seed") for item in self.overrides):
            raise ValueError(f"--set gives {self.key} or train.seed, which this ablation sets itself; leave it out there")
        for name in ("max_tokens", "context"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1")
        for value in self.values:
            self.load(value, self.seeds[0])

    def load(self, value: Any, seed: int) -> Recipe:
        """The recipe of one run."""
        return load_recipe(self.recipe, (*self.overrides, f"{self.key}={_text(value)}", f"train.seed={seed}"))

    def folder(self, value: Any, seed: int) -> str:
        """Name of a run's folder."""
        return f"{self.key.partition('.')[2]}-{re.sub(r'[^A-Za-z0-9._-]+', '_', _text(value))}-seed-{seed}"


def parse_over(text: str) -> tuple[str, tuple[Any, ...]]:
    """ "model.memory_blocks=1,4,8,16" as the key and its values, read as YAML; a list is written in brackets.

    Raises:
        ValueError: for text of another form.
    """
    key, equals, values = text.partition("=")
    if not equals or "." not in key:
        raise ValueError(f"--over {text!r} is not of the form section.key=value,value,..., such as model.memory_blocks=1,4,8,16")
    try:
        found = yaml.safe_load(f"[{values}]")
    except yaml.YAMLError as error:
        raise ValueError(f"--over {text!r}: {values!r} is not readable YAML: {error}") from error
    return key.strip(), tuple(found)


def ablate(plan: Ablation, out: Path, *, made_by: str = "", say: Say = print, device: str = "cpu") -> SuiteResult:
    """Train what is not trained yet, measure what is not measured yet, and write OUT/fig3.json, ablation.md, .html and .png.

    Runs are OUT/KEY-VALUE-seed-SEED. A run that is finished is used as it is; one that was stopped goes on.

    Raises:
        RecipeError: before anything is trained, for a run in OUT that another recipe or other data made, and for one that machine,
            recipe and data do not allow.
        What `train` raises.
    """
    check_drawing()
    wanted = [(value, seed, out / plan.folder(value, seed), plan.load(value, seed)) for value in plan.values for seed in plan.seeds]
    done = {
        folder: _finished(folder, recipe, _check(plan, f"{plan.key} = {_text(value)}, seed {seed}", recipe))
        for value, seed, folder, recipe in wanted
    }
    make_folder(out)
    rows = []
    for value, seed, folder, recipe in wanted:
        if done[folder]:
            say(f"{folder} is finished and used as it is")
        else:
            say(f"{folder}: training {plan.key} = {_text(value)}, seed {seed}")
            train(recipe, folder)
        rows.append({"value": _text(value), "seed": seed, **_measure(plan, folder, device)})
    result = summarise(plan, rows, made_by)
    result.save(out / f"{SUITE}.json")
    draw_ablation(result, out / "ablation.png")
    page = _page(plan, result, made_by)
    write_text(out / "ablation.md", page)
    write_text(out / "ablation.html", to_html(page, out))
    return result


def summarise(plan: Ablation, rows: Sequence[dict[str, Any]], made_by: str = "") -> SuiteResult:
    """Means and intervals over seeds, and differences from the first value paired by seed, of rows {value, seed, loss, ...}."""
    first = _text(plan.values[0])
    losses = {(row["value"], row["seed"]): row["loss"] for row in rows}
    values, paired, scores = [], [], []
    for value in map(_text, plan.values):
        mine = [losses[value, seed] for seed in plan.seeds]
        estimate = over_seeds(mine)
        values.append({"value": value, "losses": mine, **_interval(estimate)})
        tokens = sum(row["tokens"] for row in rows if row["value"] == value)
        scores.append(Score(f"{plan.key}={value}", "loss", estimate.mean, estimate.error, len(mine), 0, VERSION, str(plan.recipe)))
        values[-1]["tokens"] = tokens
        if value != first:
            difference = over_seeds([losses[value, seed] - losses[first, seed] for seed in plan.seeds])
            paired.append({"value": value, **_interval(difference), "verdict": _verdict(difference)})
    extra = {
        "key": plan.key,
        "seeds": list(plan.seeds),
        "values": values,
        "paired": paired,
        "rows": list(rows),
        "provenance": {"versions": versions(), "plan": _plain(asdict(plan)), "recipe": plan.load(*_first(plan)).to_dict()},
    }
    return SuiteResult(SUITE, f"{plan.recipe.stem} over {plan.key}", made_by, tuple(scores), extra)


def _first(plan: Ablation) -> tuple[Any, int]:
    return plan.values[0], plan.seeds[0]


def _interval(estimate: Estimate) -> dict[str, float | None]:
    return {"mean": estimate.mean, "error": estimate.error, "half_width": estimate.half_width}


def _verdict(difference: Estimate) -> str:
    if difference.beyond_noise is None:
        return "one seed: no verdict"
    if not difference.beyond_noise:
        return "no difference beyond the noise"
    return "worse" if difference.mean > 0 else "better"


def _check(plan: Ablation, name: str, recipe: Recipe) -> dict[str, Any]:
    """What a checkpoint of a run would say of its recipe and data (`setup.Inputs.about`).

    Raises:
        RecipeError: what its training or its measurement would raise, as far as machine, recipe and data tell that now.
    """
    try:
        check_machine(recipe)
        inputs = open_inputs(recipe)
        _window(plan, recipe, TokenDataset(recipe.data.path, "validation"))
    except ValueError as error:
        raise RecipeError(f"{name}: {error}") from error
    return inputs.about


def _finished(folder: Path, recipe: Recipe, about: dict[str, Any]) -> bool:
    """Whether a run is there and at its end. Raises RecipeError when another recipe, or other data than `about` says, made it."""
    if not (folder / "recipe.yaml").is_file():
        return False
    run = Run.open(folder)
    made, asked = run.recipe.to_dict(), recipe.to_dict()
    asked["data"]["path"] = str(Path(recipe.data.path).resolve())
    different = [
        f"{section}.{name}: {made[section].get(name)!r} there, {value!r} asked for"
        for section, fields in asked.items()
        for name, value in fields.items()
        if made[section].get(name) != value and name not in _NO_MATTER
    ]
    if different:
        raise RecipeError(f"{folder} was made by another recipe ({'; '.join(different)}); choose another --out, or remove it")
    if not run.steps:
        return False
    # The data folder may have been filled anew since: runs of one seed would no longer share their batches.
    checkpoint = run.checkpoint()
    different = other_data(about_checkpoint(checkpoint), about, recipe.data.path)
    if different:
        raise RecipeError(
            f"{folder} was trained on other data ({'; '.join(different)}), and runs are paired on the same batches; choose another "
            "--out, remove it, or prepare the data again as they were"
        )
    return _step(checkpoint) >= recipe.train.steps


def _window(plan: Ablation, recipe: Recipe, validation: TokenDataset) -> int:
    """Predictions in a window of the measurement. Raises RecipeError when no document holds one."""
    if plan.context == 1:
        return validation_context(recipe, validation)
    context, longest = plan.context * recipe.data.context, validation.longest_document
    if longest <= context:
        raise RecipeError(
            f"--context {plan.context} reads {context + 1} tokens in a window, but the longest document of the validation split of "
            f"{recipe.data.path} has {longest}; use a smaller --context, or longer documents"
        )
    return context


def _measure(plan: Ablation, folder: Path, device: str) -> dict[str, Any]:
    """Validation loss of a finished run; kept in RUN/evals/ablation.json, and read from there when it was asked alike.

    "Alike" is of the same checkpoint (SHA-256 of its trainer.json, which has those of its other files) on the same data.
    """
    run = Run.open(folder)
    validation, checkpoint = run.dataset("validation"), run.checkpoint()
    context = _window(plan, run.recipe, validation)
    asked = {"step": _step(checkpoint), "max_tokens": plan.max_tokens, "context": context}
    asked |= {"checkpoint": file_sha256(checkpoint / TRAINER), "data": fingerprint(validation)}
    file = folder / EVALS / MEASURED
    kept = _kept(file)
    if kept is not None and kept.get("asked") == asked and "found" in kept:
        return kept["found"]
    model = run.load_model(device=device)
    result = evaluate(
        model,
        validation,
        context=context,
        max_tokens=plan.max_tokens,
        training_context=run.recipe.data.context,
    )
    whole = result.whole
    found = {"loss": whole.mean, "error_over_documents": whole.error, "tokens": whole.tokens, "step": asked["step"]}
    found |= {"run": str(folder), "parameters": sum(p.numel() for p in model.parameters())}
    make_folder(file.parent)
    write_json(file, {"asked": asked, "found": found})
    return found


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _kept(file: Path) -> dict[str, Any] | None:
    """What an earlier measurement kept; None where there is none, or it is damaged: then it is made again."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return kept if isinstance(kept, dict) else None


def _page(plan: Ablation, result: SuiteResult, made_by: str) -> str:
    seeds = len(plan.seeds)
    about = (
        f"Validation loss of `{plan.recipe}` with `{plan.key}` varied, {seeds} seed{'s' * (seeds > 1)} each. ± is the 95% interval "
        "over seeds (Student's t); differences are paired by seed: same first weights where the key adds no parameter, same "
        "batches."
    )
    parts = [f"# {plan.key}", "![Ablation](ablation.png)", about, ablation_table(result), f"Made by:\n\n{quote(made_by)}"]
    return "\n\n".join(parts) + "\n"


def _text(value: Any) -> str:
    """A value as a recipe writes it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
