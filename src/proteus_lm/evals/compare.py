"""Two models on the same windows: the difference pair by pair, and a sentence that can say it did not help."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from proteus_lm.evals.perplexity import PerplexityResult
from proteus_lm.evals.statistics import Estimate, ratio_estimate


@dataclass(frozen=True)
class PairedDifference:
    """Loss of `other` minus loss of `base` on equal windows, nats per token; negative is better.

    Args:
        base, other: what the two are called in sentences.
        whole: over all positions from `start` on.
        bins: over each bin of positions.
        edges: edges of those bins.
        start: first position that counts in `whole`.
    """

    base: str
    other: str
    whole: Estimate
    bins: tuple[Estimate, ...]
    edges: tuple[int, ...]
    start: int = 0

    def verdict(self) -> str:
        """One sentence: better, worse, or no difference beyond the noise (95%, Student's t)."""
        d = self.whole
        signed = f"{self.other} minus {self.base} is {d.mean:+.4f}"
        if d.error is None:
            return f"{signed} nats per token on a single window; no error can be given, so no verdict."
        basis = f"mean and standard error over {d.groups} {d.unit}, {d.tokens:,} tokens, the same for both"
        if not d.beyond_noise:
            return f"No difference beyond the noise: {signed} ± {d.error:.4f} nats per token ({basis})."
        size = f"{abs(d.mean):.4f} ± {d.error:.4f} nats per token"
        return f"{self.other} is {'worse' if d.mean > 0 else 'better'} than {self.base} by {size} ({basis})."


def compare(base: PerplexityResult, other: PerplexityResult, *, names: tuple[str, str], start: int = 0) -> PairedDifference:
    """The paired difference of two results: both models predicted the same tokens at the same positions.

    Args:
        names: what `base` and `other` are called.
        start: an edge of the bins; positions before it do not count in the difference as a whole.

    Raises:
        ValueError: when the two did not read the same windows with the same bins, or `start` is no edge before the last.
    """
    if base.windows != other.windows or base.edges != other.edges:
        raise ValueError(
            f"{names[0]} and {names[1]} were not evaluated on the same windows ({len(base.windows)} and {len(other.windows)}, "
            f"bins {base.edges} and {other.edges}); evaluate both on one split with one context, max_tokens and bins"
        )
    if start not in base.edges[:-1]:
        raise ValueError(f"start is {start}; it must be an edge of the bins before the last, one of {base.edges[:-1]}")
    first = base.edges.index(start)
    difference = other.sums - base.sums
    groups = [w.document for w in base.windows]
    columns = (ratio_estimate(difference[:, i], base.counts[:, i], groups) for i in range(difference.shape[1]))
    whole = ratio_estimate(np.asarray(difference[:, first:].sum(1)), base.counts[:, first:].sum(1), groups)
    return PairedDifference(*names, whole, tuple(columns), base.edges, start)
