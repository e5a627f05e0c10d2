"""How an effect changes with size: ordinary least squares over seeds, on the logarithm of size.

The slope is a weighted sum of the sizes' means, so its variance is a sum of the means' variances,
each from the seeds of its own size: sizes need not spread alike. The interval is Student's with the
degrees of freedom of Welch (1947) and Satterthwaite (1946).

Suffixes: K sizes, S seeds of a size.
"""

from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

from analysis.results import Array
from analysis.stats import LEVEL, Interval


def slope_over_sizes(parameters_K: Sequence[int], effects_KS: Sequence[Array]) -> Interval:
    """Change of the effect a tenfold size, and its interval of level `LEVEL`."""
    assert len({*parameters_K}) > 1 and min(map(len, effects_KS)) > 1, "nothing to fit"
    size_K, seeds_K = np.log10(parameters_K), np.array([len(it) for it in effects_KS])
    centred_K = size_K - np.average(size_K, weights=seeds_K)
    weight_K = seeds_K * centred_K / (seeds_K * centred_K**2).sum()
    mean_K = np.array([it.mean() for it in effects_KS])
    variance_K = weight_K**2 * np.array([it.var(ddof=1) for it in effects_KS]) / seeds_K
    estimate, variance = float(weight_K @ mean_K), variance_K.sum()
    if not variance:
        return Interval(estimate, estimate, estimate)
    freedom = variance**2 / (variance_K**2 / (seeds_K - 1)).sum()
    reach = float(stdtrit(freedom, (1 + LEVEL) / 2) * np.sqrt(variance))
    return Interval(estimate, estimate - reach, estimate + reach)
