"""The gate for models people already have: the capacity schedule put into layers and optimisers that know nothing of it.

`attach` gates the token mixers of a transformers or flash-linear-attention model, `detach` takes the gates off,
`gate_mlp` says to `GatedAdamW` which MLP parameters of any model open by blocks. See docs/attach.md.
"""

from proteus_lm.attach.mlp import gate_mlp
from proteus_lm.attach.model import attach, detach

__all__ = ["attach", "detach", "gate_mlp"]
