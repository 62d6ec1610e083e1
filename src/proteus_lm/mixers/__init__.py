"""Token mixers by the name a configuration uses."""

from __future__ import annotations

from proteus_lm.mixers.attention import AttentionMixer
from proteus_lm.mixers.base import Mixer
from proteus_lm.mixers.comba import CombaMixer
from proteus_lm.mixers.deltanet import DeltaNetMixer, GatedDeltaNetMixer
from proteus_lm.mixers.retnet import RetNetMixer
from proteus_lm.mixers.swla import SWLAMixer
from proteus_lm.mixers.titans import TitansMixer
from proteus_lm.mixers.titans_mac import MACMixer
from proteus_lm.mixers.titans_mag import MAGMixer
from proteus_lm.mixers.titans_mal import MALMixer

registry: dict[str, type[Mixer]] = {
    "attention": AttentionMixer,
    "comba": CombaMixer,
    "deltanet": DeltaNetMixer,
    "gated_deltanet": GatedDeltaNetMixer,
    "retnet": RetNetMixer,
    "swla": SWLAMixer,
    "titans": TitansMixer,
}

titans_forms: dict[str, type[Mixer]] = {"lmm": TitansMixer, "mac": MACMixer, "mag": MAGMixer, "mal": MALMixer}
"""Of mixer "titans", by `titans_variant`."""

__all__ = [
    "AttentionMixer",
    "CombaMixer",
    "DeltaNetMixer",
    "GatedDeltaNetMixer",
    "MACMixer",
    "MAGMixer",
    "MALMixer",
    "Mixer",
    "RetNetMixer",
    "SWLAMixer",
    "TitansMixer",
    "registry",
    "titans_forms",
]
