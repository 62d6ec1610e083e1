"""Proteus: language models whose fixed-size memory is opened on a schedule (arXiv 2608.16844).

Importing this package registers the model with transformers' `AutoConfig` and `AutoModelForCausalLM`.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM

from proteus_lm.activation import Activation
from proteus_lm.attach import attach, detach, gate_mlp
from proteus_lm.cache import ProteusCache
from proteus_lm.config import ProteusConfig
from proteus_lm.model import ProteusForCausalLM
from proteus_lm.optim import GatedAdamW
from proteus_lm.presets import preset
from proteus_lm.schedule import ActivationSchedule

__all__ = [
    "Activation",
    "ActivationSchedule",
    "GatedAdamW",
    "ProteusCache",
    "ProteusConfig",
    "ProteusForCausalLM",
    "attach",
    "detach",
    "gate_mlp",
    "preset",
]
__version__ = "0.1.0"

AutoConfig.register(ProteusConfig.model_type, ProteusConfig)
AutoModelForCausalLM.register(ProteusConfig, ProteusForCausalLM)
