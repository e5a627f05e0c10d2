"""Intervals for the ratio of two arms' mean k3 KL that the simulation compares.

Each takes the two arms' k3 KL by seed and step (S, T) and gives a 95 % interval of the log ratio.
"""

from collections.abc import Callable, Mapping

import numpy as np
from scipy import stats

Array = np.ndarray
Bounds = tuple[float, float]
LEVEL = 0.95
RESAMPLES = 1000


def t_over_seeds(arm_ST: Array, control_ST: Array) -> Bounds:
    """Student's t of the seeds' log ratios of means."""
    return _student(np.log(arm_ST.mean(1) / control_ST.mean(1)))


def t_of_pooled_means(arm_ST: Array, control_ST: Array) -> Bounds:
    """Log ratio of the means over all steps; standard error from the seeds' deviations (delta)."""
    arm_S, control_S = arm_ST.mean(1), control_ST.mean(1)
    ratio = arm_S.mean() / control_S.mean()
    influence_S = arm_S / arm_S.mean() - control_S / control_S.mean()
    reach = _quantile(len(arm_S)) * influence_S.std(ddof=1) / np.sqrt(len(arm_S))
    return np.log(ratio) - reach, np.log(ratio) + reach


def wider_of_both_t(arm_ST: Array, control_ST: Array) -> Bounds:
    """The outer ends of `t_over_seeds` and `t_of_pooled_means`."""
    first, second = t_over_seeds(arm_ST, control_ST), t_of_pooled_means(arm_ST, control_ST)
    return min(first[0], second[0]), max(first[1], second[1])


def wider_with_one_more_spike(arm_ST: Array, control_ST: Array) -> Bounds:
    """`wider_of_both_t`, and again with one more spike in either arm; the outer ends of all three.

    The spike is as large as the largest of both arms, relative to its own run's median, and takes
    the place of the run's smallest step, in the seed whose ratio it moves furthest.
    """
    bounds = [wider_of_both_t(arm_ST, control_ST)]
    factor = max(_largest_factor(arm_ST), _largest_factor(control_ST))
    bounds.append(wider_of_both_t(_with_spike(arm_ST, factor), control_ST))
    bounds.append(wider_of_both_t(arm_ST, _with_spike(control_ST, factor)))
    return min(low for low, _ in bounds), max(high for _, high in bounds)


def bootstrap_t(arm_ST: Array, control_ST: Array) -> Bounds:
    """Studentized bootstrap of whole seeds, of the log ratio of the means over all steps."""
    arm_S, control_S = arm_ST.mean(1), control_ST.mean(1)
    num_seeds = len(arm_S)
    log_ratio, error = (float(it[0]) for it in _pooled(arm_S[None], control_S[None]))
    drawn = np.random.default_rng(0).integers(num_seeds, size=(RESAMPLES, num_seeds))
    of_draws, errors = _pooled(arm_S[drawn], control_S[drawn])
    usable = errors > 0
    quantiles = np.quantile((of_draws - log_ratio)[usable] / errors[usable], [0.025, 0.975])
    return log_ratio - quantiles[1] * error, log_ratio - quantiles[0] * error


def median_of_means(arm_ST: Array, control_ST: Array) -> Bounds:
    """Smallest and largest of the seeds' ratios of means: 94 % for the median with five seeds."""
    log_S = np.log(arm_ST.mean(1) / control_ST.mean(1))
    return float(log_S.min()), float(log_S.max())


def block_bootstrap(arm_ST: Array, control_ST: Array) -> Bounds:
    """Percentiles over seeds and blocks of steps, of the means (secondary in the first records)."""
    return _bootstrapped(arm_ST, control_ST, lambda values: values.mean(-1))


def interquartile_bootstrap(arm_ST: Array, control_ST: Array) -> Bounds:
    """The same of interquartile means, which decided the first records."""
    return _bootstrapped(arm_ST, control_ST, lambda values: stats.trim_mean(values, 0.25, axis=-1))


def t_of_typical_steps(arm_ST: Array, control_ST: Array) -> Bounds:
    """Student's t of the seeds' mean log steps: geometric means, in which a spike counts little."""
    return _student((np.log(arm_ST) - np.log(control_ST)).mean(1))


CANDIDATES: Mapping[str, Callable[[Array, Array], Bounds]] = {
    it.__name__: it
    for it in (
        interquartile_bootstrap,
        block_bootstrap,
        t_of_typical_steps,
        median_of_means,
        bootstrap_t,
        t_over_seeds,
        t_of_pooled_means,
        wider_of_both_t,
        wider_with_one_more_spike,
    )
}


def _student(log_S: Array) -> Bounds:
    reach = _quantile(len(log_S)) * log_S.std(ddof=1) / np.sqrt(len(log_S))
    return float(log_S.mean() - reach), float(log_S.mean() + reach)


def _quantile(num_seeds: int) -> float:
    return float(stats.t.ppf((1 + LEVEL) / 2, num_seeds - 1))


def _pooled(arm_RS: Array, control_RS: Array) -> tuple[Array, Array]:
    """Log ratio of the means over seeds and its standard error, of every resample."""
    arm_R1, control_R1 = arm_RS.mean(1, keepdims=True), control_RS.mean(1, keepdims=True)
    influence_RS = arm_RS / arm_R1 - control_RS / control_R1
    error_R = influence_RS.std(1, ddof=1) / np.sqrt(arm_RS.shape[1])
    return np.log(arm_R1 / control_R1)[:, 0], error_R


def _largest_factor(values_ST: Array) -> float:
    return float((values_ST / np.median(values_ST, 1, keepdims=True)).max())


def _with_spike(values_ST: Array, factor: float) -> Array:
    """The seed with the largest median spikes once more: it moves the means most."""
    spiked_ST = values_ST.copy()
    medians_S = np.median(values_ST, 1)
    seed = int(medians_S.argmax())
    spiked_ST[seed, values_ST[seed].argmin()] = factor * medians_S[seed]
    return spiked_ST


def _bootstrapped(arm_ST: Array, control_ST: Array, average: Callable[[Array], Array]) -> Bounds:
    num_seeds, num_steps = arm_ST.shape
    generator = np.random.default_rng(0)
    block = max(1, round(num_steps ** (1 / 3)))
    num_blocks = -(-num_steps // block)
    seeds_RS1 = generator.integers(num_seeds, size=(RESAMPLES, num_seeds, 1))
    starts = generator.integers(num_steps, size=(RESAMPLES, num_seeds, num_blocks, 1))
    steps = (starts + np.arange(block)) % num_steps
    steps_RST = steps.reshape(RESAMPLES, num_seeds, -1)[:, :, :num_steps]
    top_R, bottom_R = (
        average(values_ST[seeds_RS1, steps_RST].reshape(RESAMPLES, -1))
        for values_ST in (arm_ST, control_ST)
    )
    quantile = stats.t.ppf((1 + LEVEL) / 2, num_blocks - 1)
    tail = stats.norm.cdf(-np.sqrt(num_blocks / (num_blocks - 1)) * quantile)
    low, high = np.quantile(np.log(top_R / bottom_R), [tail, 1 - tail])
    return float(low), float(high)
