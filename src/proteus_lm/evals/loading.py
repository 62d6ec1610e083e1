"""From a run folder, a model folder or a name on the hub to a model and transformers' tokenizer of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from proteus_lm.attach import attach
from proteus_lm.attach.model import saved_setup
from proteus_lm.config import ProteusConfig
from proteus_lm.data.files import file_sha256
from proteus_lm.data.record import damage
from proteus_lm.evals.hub import MissingData, require_hub

CONFIG, CHECKPOINTS, TRAINER = "config.json", "checkpoints", "trainer.json"


Loaded = tuple[Any, Any, str, dict[str, Any] | None]


def load(source: str | Path, step: int | None, dtype: torch.dtype | None) -> Loaded:
    """The model (on the CPU), its tokenizer, its name and `LanguageModel.checkpoint`; arguments, errors as `LanguageModel.open`."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if step is not None:
            raise ValueError(f"step {step} of {source}, which is no run folder here; leave the step out")
        return *_from_hub(str(source), dtype), str(source), None
    checkpoint = _checkpoint(folder, step)
    wrong = damage(checkpoint, TRAINER, contents=True) if (checkpoint / TRAINER).is_file() else None
    if wrong is not None:
        raise ValueError(f"checkpoint {checkpoint} is damaged: {wrong}; use another step of its run, or copy this one again")
    try:
        return *_pretrained(checkpoint, dtype, local_files_only=True), _name(folder, checkpoint), _about(checkpoint)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"the model or tokenizer in {checkpoint} cannot be loaded: {error}") from error


def _checkpoint(folder: Path, step: int | None) -> Path:
    """The folder itself when it holds a model, else the checkpoint of a run: that of `step`, or the newest."""
    if (folder / CONFIG).is_file():
        if step is not None:
            raise ValueError(f"step {step} of {folder}, which is one model and no run; leave the step out")
        return folder
    found = {int(path.name.removeprefix("step-")): path for path in sorted((folder / CHECKPOINTS).glob("step-*[0-9]"))}
    if not found:
        raise FileNotFoundError(
            f"{folder} is neither a model (no {CONFIG}) nor a run with a checkpoint; give the folder that `proteus train` wrote, "
            "one that `save_pretrained` wrote, or a name on the hub"
        )
    if step is not None and step not in found:
        raise FileNotFoundError(f"{folder} has no checkpoint of step {step}; it has {', '.join(map(str, sorted(found)))}")
    return found[max(found) if step is None else step]


def _name(folder: Path, checkpoint: Path) -> str:
    return str(folder) if folder == checkpoint else f"{folder} ({checkpoint.name})"


def _about(checkpoint: Path) -> dict[str, Any] | None:
    """What tells one checkpoint of ours from another; None for a model that training did not save.

    Its trainer.json holds recipe, data and the SHA-256 of its other files: that file's own stands for all.
    """
    record = checkpoint / TRAINER
    step = json.loads(record.read_text(encoding="utf-8")).get("step") if record.is_file() else None
    return None if step is None else {"step": step, "sha256": file_sha256(record)}


def _from_hub(name: str, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """Of a name on the hub: from the local cache when it is there, else asked for."""
    try:
        return _pretrained(name, dtype, local_files_only=True)
    except (OSError, ValueError):  # not in the cache, or not whole
        pass
    remedy = "Give the folder of a run or of a model that is here."
    try:
        require_hub(f"a folder or cached model {name}", remedy)
        return _pretrained(name, dtype, local_files_only=False)
    except MissingData as error:
        raise FileNotFoundError(str(error)) from error
    except OSError as error:
        raise FileNotFoundError(f"no folder {name} here, and the hub gave no such model: {error}. {remedy}") from error


def _pretrained(source: str | Path, dtype: torch.dtype | None, *, local_files_only: bool) -> tuple[Any, Any]:
    """The model in evaluation mode, gated as its configuration says (`proteus_lm.attach`), and its tokenizer.

    Raises:
        ValueError: when the weights are not those of the configuration: transformers would fill in random ones and go on; or the
            set-up of a gate there cannot be restored.
    """
    config = AutoConfig.from_pretrained(source, local_files_only=local_files_only)
    precision = dtype or (torch.float32 if isinstance(config, ProteusConfig) else "auto")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source, config=config, dtype=precision, local_files_only=local_files_only, output_loading_info=True
    )
    model, report = loaded
    ours = ("unexpected_keys",) if isinstance(config, ProteusConfig) else ()  # others' files may hold heads that are not used here
    for kind in ("missing_keys", *ours):
        names = sorted(map(str, report[kind]))
        if names:
            raise ValueError(
                f"its weights are not those of its {CONFIG}: {len(names)} {kind.replace('_', ' ')}, such as {names[0]}"
            )
    if saved_setup(model) is not None:  # transformers restores none
        attach(model)
    return model.eval(), AutoTokenizer.from_pretrained(source, local_files_only=local_files_only)
