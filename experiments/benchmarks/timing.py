"""Wall-clock times of several arms, taken in turns so that all see the same clock and heat."""

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import Any

import torch

WARM_UP_ROUNDS = 3


def time_in_turns(
    steps: Mapping[str, Callable[[], None]], device: str, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each arm's step in each round, the device idle before and after."""
    times: dict[str, list[float]] = {arm: [] for arm in steps}
    for _ in range(WARM_UP_ROUNDS + rounds):
        for arm, step in steps.items():
            synchronize(device)
            start = perf_counter()
            step()
            synchronize(device)
            times[arm].append((perf_counter() - start) * 1e3)
    return {arm: values[WARM_UP_ROUNDS:] for arm, values in times.items()}


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Median and quartiles of each arm's times and of their ratio to arm `bf16` by round."""
    baseline = times["bf16"]
    result = {}
    for arm, values in times.items():
        ratios = [value / base for value, base in zip(values, baseline, strict=True)]
        result[arm] = {
            "step_ms": quartiles(values),
            "ratio": median(values) / median(baseline),
            "ratio_by_round": quartiles(ratios),
        }
    return result


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return torch.quantile(torch.tensor(values), torch.tensor([0.25, 0.5, 0.75])).tolist()


def synchronize(device: str) -> None:
    """Wait until the device is idle."""
    if device == "cuda":
        torch.cuda.synchronize()
