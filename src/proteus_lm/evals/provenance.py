"""What a result needs to be made again: versions, configuration, settings. Kept beside every number that is saved."""

from __future__ import annotations

import platform
from dataclasses import asdict, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from proteus_lm.cache import unlock_positions

if TYPE_CHECKING:
    from proteus_lm.evals.language_model import LanguageModel
    from proteus_lm.evals.suite import SuiteOptions, SuiteResult

_PACKAGES = ("proteus-lm", "torch", "transformers", "tokenizers", "numpy", "lm-eval")


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that a result depends on; a library that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def model_config(model: Any) -> dict[str, Any]:
    """A model's configuration, ready for JSON: of ours the fields of `ProteusConfig` alone."""
    config = model.config
    own = getattr(type(config), "__annotations__", {}) if getattr(config, "model_type", "") == "proteus" else {}
    fields = {name: getattr(config, name) for name in own if hasattr(config, name)} if own else config.to_dict()
    return {name: _plain(value) for name, value in fields.items() if not name.startswith("_")}


def with_provenance(result: SuiteResult, model: LanguageModel, options: SuiteOptions) -> SuiteResult:
    """The result with `extra["provenance"]`: versions, device, weights' type, checkpoint, configuration, the suite's options."""
    parameters = list(model.model.parameters())
    about = {
        "versions": versions(),
        "device": device_name(parameters[0].device),
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in parameters),
        **({} if model.checkpoint is None else {"checkpoint": model.checkpoint}),
        "config": model_config(model.model),
        **({"unlock_positions": unlock_positions(model.model.schedule)} if model.is_ours else {}),  # stretched where the user asked
        "options": _plain(asdict(options)),
    }
    return replace(result, extra={**result.extra, "provenance": about}, command=result.command or options.command)


def device_name(device: torch.device) -> str:
    """The name of a device, with the card's where it is one."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _plain(value: Any) -> Any:
    """Lists, dicts, numbers and text; anything else as text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | type(None)) else str(value)
