"""Proteus: language models whose fixed-size memory is opened on a schedule (arXiv 2608.16844)."""

from proteus_lm.activation import Activation
from proteus_lm.schedule import ActivationSchedule

__all__ = ["Activation", "ActivationSchedule"]
__version__ = "0.1.0"
