"""Ratios of the parity benchmark: mean k3 KL of an arm over that of the noise floor."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np
import pandas as pd

RESAMPLES = 10_000


class Batch(TypedDict):
    """Some sampled sequences: means over their tokens."""

    seed: int
    k3_kl: float
    kl: float
    tokens: int


Ratios = dict[str, dict[str, float | int]]


def ratios_of_both_floors(arms: Mapping[str, Sequence[Batch]]) -> dict[str, Ratios]:
    """Of the BF16 model's floor all arms, of the rounded model's those that serve its weights."""
    qat = {arm: arms[arm] for arm in ("rounded", "qat-pow2")}
    return {
        "of_noise_floor": ratios_of_floor(arms, "bf16"),
        "of_rounded_floor": ratios_of_floor(qat, "rounded"),
    }


def ratios_of_floor(arms: Mapping[str, Sequence[Batch]], floor: str) -> Ratios:
    """Each arm's mean k3 KL over the floor's, over all tokens, and its 95 % interval.

    Percentile bootstrap over batches of sequences, arms resampled apart. In an MoE a few rerouted
    tokens carry much of the sum, in BF16 too: the interval shows whether there were enough.
    """
    generator = np.random.default_rng(0)
    floors = _resampled_means(arms[floor], generator)
    ratios: Ratios = {}
    for arm, batches in arms.items():
        means = floors if arm == floor else _resampled_means(batches, generator)
        low, high = np.quantile(means / floors, (0.025, 0.975))
        ratios[arm] = {
            "mean_k3_kl": _mean(batches),
            "ratio": _mean(batches) / _mean(arms[floor]),
            "low": float(low),
            "high": float(high),
            "tokens": sum(batch["tokens"] for batch in batches),
        }
    return ratios


def write_batches(models: Mapping[str, Mapping[str, Sequence[Batch]]], path: Path) -> None:
    """One row a batch: model, arm, seed, means and tokens."""
    rows = [
        {"model": model, "arm": arm, **batch}
        for model, arms in models.items()
        for arm, batches in arms.items()
        for batch in batches
    ]
    # without a time of writing, so that equal batches make equal files
    pd.DataFrame(rows).to_csv(path, index=False, compression={"method": "gzip", "mtime": 0})


def _mean(batches: Sequence[Batch]) -> float:
    total = sum(batch["k3_kl"] * batch["tokens"] for batch in batches)
    return total / sum(batch["tokens"] for batch in batches)


def _resampled_means(batches: Sequence[Batch], generator: np.random.Generator) -> np.ndarray:
    """Mean over the tokens of each of RESAMPLES draws of batches."""
    tokens = np.array([batch["tokens"] for batch in batches])
    sums = tokens * np.array([batch["k3_kl"] for batch in batches])
    drawn = generator.integers(len(batches), size=(RESAMPLES, len(batches)))
    means: np.ndarray = sums[drawn].sum(1) / tokens[drawn].sum(1)
    return means
