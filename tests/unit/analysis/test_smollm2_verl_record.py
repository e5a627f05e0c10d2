"""What docs/results.md says in words of `collapse-smollm2-verl`, recomputed from its record."""

from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from tests.records import recorded_metrics
from tests.unit.analysis.readme import RECORDS, RESULTS

FOLDER = RECORDS / "collapse-smollm2-verl"
SEEDS = range(60, 68)
QAT, NOQAT, TIS, BF16 = (
    "nvfp4-qat.lr3e-5",
    "nvfp4-noqat.lr3e-5",
    "nvfp4-noqat.lr3e-5-tis",
    "bf16.lr3e-5-bf16",
)
REWARD = "critic/score/mean"
CAPPED = "rollout_corr/rollout_is_ratio_fraction_high"


@cache
def metric(setting: str, name: str = REWARD) -> NDArray[np.float64]:
    """(seeds, steps)."""
    runs = (FOLDER / f"smollm2-135m-verl_{setting}_seed{s}" for s in SEEDS)
    return np.array([recorded_metrics(run)[name] for run in runs])


def difference(
    first: str, second: str, steps: slice = slice(None), seeds: slice | list[int] = slice(None)
) -> tuple[float, float, float]:
    """Mean over seeds of the differences of mean reward, and the ends of its 90 % t-interval."""
    by_seed = (metric(first)[seeds, steps] - metric(second)[seeds, steps]).mean(axis=1)
    mean, num_seeds = by_seed.mean(), len(by_seed)
    half = stats.t.ppf(0.95, num_seeds - 1) * by_seed.std(ddof=1) / num_seeds**0.5
    return mean, mean - half, mean + half


def sign_flip_p(first: str, second: str) -> float:
    by_seed = (metric(first) - metric(second)).mean(axis=1)
    flipped = (abs(np.mean(by_seed * signs)) for signs in product([1, -1], repeat=len(by_seed)))
    return float(np.mean([value >= abs(by_seed.mean()) - 1e-12 for value in flipped]))


def smoothed(setting: str) -> NDArray[np.float64]:
    windows = np.lib.stride_tricks.sliding_window_view(metric(setting), 20, axis=1)
    found: NDArray[np.float64] = windows.mean(axis=-1)
    return found


def losses(setting: str) -> NDArray[np.float64]:
    """Largest share of its best smoothed reward that each run loses."""
    reward = smoothed(setting)
    found: NDArray[np.float64] = (1 - reward / np.maximum.accumulate(reward, axis=1)).max(axis=1)
    return found


def last(setting: str) -> str:
    return f"{metric(setting)[:, -20:].mean():.2f}"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}"


def test_token_tis() -> None:
    lost = np.sort(losses(TIS))
    assert f"Over the last 20 steps it earns {last(TIS)}, QAT {last(QAT)}." in RESULTS
    assert (
        f"lose {percent(lost[0])} to {percent(lost[-1])} % of their smoothed reward, five of them "
        f"{percent(lost[3])} % or more; one is at its lowest, "
    ) in RESULTS
    ends = smoothed(TIS)[:, -1] / smoothed(TIS).max(axis=1)
    assert f"at its lowest, {ends.min():.3f} of its best, at the last step" in RESULTS
    mean, low, high = (-end for end in difference(TIS, NOQAT))
    assert f"is {mean:.3f} ({high:.3f} to {low:.3f}) below that without QAT or TIS" in RESULTS
    assert f"(exact sign-flip p {sign_flip_p(TIS, NOQAT):.3f}), in seven of eight seeds" in RESULTS
    by_seed = (metric(TIS) - metric(NOQAT)).mean(axis=1)
    assert (by_seed < 0).sum() == 7 and f"by {-by_seed[by_seed < 0].max():.3f}. It acts" in RESULTS
    capped = np.median(metric(TIS, CAPPED), axis=1)
    assert f"of {percent(capped.min(), 1)} to {percent(capped.max(), 1)} % of the tokens" in RESULTS


def test_distance_to_bf16() -> None:
    by_seed = (metric(QAT) - metric(BF16)).mean(axis=1)
    assert (by_seed < 0).sum() == 7
    first, _, _ = difference(QAT, BF16, slice(20))
    mean, low, high = (-end for end in difference(QAT, BF16, slice(-20, None)))
    assert (
        f"over the first 20 steps QAT earns {-first:.3f} less, over the last 20 it earns "
        f"{last(QAT)} and BF16 {last(BF16)} ({mean:.3f} less, {high:.3f} to {low:.3f})"
    ) in RESULTS
    assert f"spread by {by_seed.std(ddof=1):.3f} over seeds" in RESULTS
    assert (
        f"seed 65 has {by_seed[5]:.3f}, and seed 66, whose run in BF16 loses "
        f"{percent(losses(BF16)[6])} % of its smoothed reward, {by_seed[6]:+.3f}."
    ) in RESULTS
    mean, low, high = (-end for end in difference(QAT, BF16, seeds=[0, 1, 2, 3, 4, 5, 7]))
    assert f"Without seed 66 it would be {mean:.3f} ({high:.3f} to {low:.3f})." in RESULTS


def test_no_qat_and_first_steps() -> None:
    qat, noqat, bf16 = (f"{metric(it)[:, 0].mean():.2f}" for it in (QAT, NOQAT, BF16))
    assert f"At the first step QAT earns {qat} and no QAT {noqat}" in RESULTS
    assert f"it starts higher, at {bf16} against {qat}" in RESULTS
    assert f"over the last 20 steps {last(QAT)} and {last(NOQAT)}." in RESULTS
    worst = np.sort(losses(NOQAT))[-3:]
    assert f"Three without QAT lose {percent(worst[0])} to {percent(worst[2])} % of" in RESULTS
    assert f"the largest loss with QAT is {percent(losses(QAT).max())} %." in RESULTS
