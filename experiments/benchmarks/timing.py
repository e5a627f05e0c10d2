"""Times of several arms, taken in turns so that all see the same clock and heat."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

WARM_UP_ROUNDS = 3


class StepTime(NamedTuple):
    """Of one step."""

    issue_ms: float  # until the CPU has queued all; where that is all of it, the device waits
    step_ms: float  # until the device is idle


def time_steps(
    steps: Mapping[str, Callable[[], None]], device: str, rounds: int
) -> dict[str, list[StepTime]]:
    """Of each arm's step in each round, the device idle before and after."""
    times: dict[str, list[StepTime]] = {arm: [] for arm in steps}
    for _ in range(WARM_UP_ROUNDS + rounds):
        for arm, step in steps.items():
            synchronize(device)
            start = perf_counter()
            step()
            issued = perf_counter()
            synchronize(device)
            times[arm].append(StepTime((issued - start) * 1e3, (perf_counter() - start) * 1e3))
    return {arm: values[WARM_UP_ROUNDS:] for arm, values in times.items()}


def summary(times: Mapping[str, Sequence[StepTime]]) -> dict[str, dict[str, Any]]:
    """Quartiles of each arm's times; the ratio of medians to arm `bf16`, and that by round."""
    baseline = [time.step_ms for time in times["bf16"]]
    result = {}
    for arm, of_arm in times.items():
        values = [time.step_ms for time in of_arm]
        ratios = [value / base for value, base in zip(values, baseline, strict=True)]
        result[arm] = {
            "step_ms": quartiles(values),
            "issue_ms": quartiles([time.issue_ms for time in of_arm]),
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


def allow_split_sums() -> None:
    """PyTorch's default of cuBLAS, which an exact arm changes for the process."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.preferred_blas_library("default")
