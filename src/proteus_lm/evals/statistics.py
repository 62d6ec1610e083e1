"""Means with an honest error: tokens of one document are not independent, so the error is over documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Two-sided 95% points of Student's t for 1 .. 30 degrees of freedom; beyond, an expansion in 1 / degrees good to 1e-3.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Estimate:
    """A mean per token over `tokens` tokens, and its standard error over `groups` groups taken as independent.

    Groups are documents, or the windows of a single document (`unit`). The error is None when there are fewer than two.
    """

    mean: float
    error: float | None
    groups: int
    tokens: int
    unit: str = "documents"

    @property
    def half_width(self) -> float | None:
        """Half of the 95% interval (Student's t); None where there is no error."""
        return None if self.error is None else t95(self.groups - 1) * self.error

    @property
    def beyond_noise(self) -> bool | None:
        """Does the 95% interval leave zero out? None when there is no error to judge by."""
        return None if self.half_width is None else abs(self.mean) > self.half_width


def t95(degrees: int) -> float:
    """The two-sided 95% point of Student's t distribution with `degrees` >= 1 degrees of freedom."""
    return _T95[degrees - 1] if degrees <= len(_T95) else 1.95996 + 2.3723 / degrees + 2.8225 / degrees**2


def ratio_estimate(sums: np.ndarray, counts: np.ndarray, groups: Sequence[int]) -> Estimate:
    """Mean sum(sums) / sum(counts) with its cluster-robust standard error (linearised ratio, Cochran 1977, ch. 6 and 9A).

    Args:
        sums: float (W,), a total for each window.
        counts: int (W,), tokens behind each total; windows without tokens are ignored.
        groups: W labels; windows with one label (one document) are taken as dependent. With a single label each window
            stands for itself: the error is then over windows of one document, too small if they are alike.
    """
    used = counts > 0
    sums, counts = sums[used].astype(np.float64), counts[used].astype(np.float64)
    tokens = int(counts.sum())
    if tokens == 0:
        return Estimate(math.nan, None, 0, 0)
    mean = float(sums.sum() / tokens)
    labels = np.asarray(groups)[used]
    names, index = np.unique(labels, return_inverse=True)
    unit = "documents"
    if len(names) == 1:
        names, index, unit = np.arange(len(labels)), np.arange(len(labels)), "windows"
    residuals = np.bincount(index, sums - mean * counts)
    size = len(names)
    error = math.sqrt(size / (size - 1) * float((residuals**2).sum())) / tokens if size > 1 else None
    return Estimate(mean, error, size, tokens, unit)


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean of one number a seed and its standard error s / sqrt(n); of a single seed without error.

    Raises:
        ValueError: without a value.
    """
    if not values:
        raise ValueError("no values, so no mean over seeds; give at least one")
    size = len(values)
    error = float(np.std(values, ddof=1)) / math.sqrt(size) if size > 1 else None
    return Estimate(float(np.mean(values)), error, size, 0, "seeds")
