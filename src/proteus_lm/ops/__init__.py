"""The mathematics of the memories: functions of tensors, no module, no configuration, no schedule.

`proteus_lm.ops.reference` holds the same names, one token at a time. Decoding steps are in `proteus_lm.ops.recurrent` and
`proteus_lm.ops.deep_step`.
"""

from proteus_lm.ops.deep import titans_memory, titans_weights
from proteus_lm.ops.delta import comba, delta_rule, gated_delta_rule
from proteus_lm.ops.hebbian import retention, swla
from proteus_lm.ops.state import SWLAState, TitansState

__all__ = [
    "SWLAState",
    "TitansState",
    "comba",
    "delta_rule",
    "gated_delta_rule",
    "retention",
    "swla",
    "titans_memory",
    "titans_weights",
]
