"""Studies of three seeds: the questions of their protocols, and the answers by its rules."""

import pytest

from analysis.collapse.few_seeds import ARMS, descriptive_rules_of
from analysis.collapse.grid import QAT, Design, Grid, Setting
from analysis.collapse.judge import judge_grid
from analysis.collapse.survival import Outcome

RATE = 2e-4
LIVES, DIES = Outcome(None, 240, 0.9, 0.2), Outcome(70, 240, 0.3, -0.6)
LOSES, GAINS_LESS = Outcome(None, 240, 0.8, -0.1), Outcome(None, 240, 0.8, 0.1)


def detail_of(outcomes: tuple[list[Outcome], ...], advantage: str) -> str:
    """What is said of outcomes without QAT, with QAT and in BF16."""
    settings = [Setting("dense", arm, RATE, advantage=advantage) for arm in ARMS]
    grid: Grid = dict(zip(settings, outcomes, strict=True))
    design = Design("dense", None, (RATE,), frozenset(settings), advantage)
    (claim,) = judge_grid(grid, design, descriptive_rules_of(design, 3), num_seeds=3)
    assert (claim.verdict, claim.name) == ("REPORTED", "at 2e-4")
    return claim.detail


@pytest.mark.parametrize(
    ("num_noqat", "num_qat", "num_bf16", "answer"),
    [
        (2, 0, 0, "it comes back"),
        (3, 1, 1, "it comes back"),
        (1, 0, 0, "open"),
        (3, 2, 0, "open"),
        (0, 0, 0, "it does not come back"),
        (3, 0, 3, "it does not come back"),
    ],
)
def test_a_difference_comes_back(num_noqat: int, num_qat: int, num_bf16: int, answer: str) -> None:
    numbers = (num_noqat, num_qat, num_bf16)
    detail = detail_of(tuple([DIES] * n + [LIVES] * (3 - n) for n in numbers), "reward")
    counts = ", ".join(f"{arm} {n} of 3" for arm, n in zip(ARMS, numbers, strict=True))
    assert detail == f"{answer}; collapsed: {counts}"


@pytest.mark.parametrize(
    ("noqat", "qat", "bf16", "answer"),
    [
        ([DIES, LOSES, LIVES], [LIVES] * 3, [LIVES] * 3, "breaks"),
        ([DIES, LOSES, LIVES], [LIVES, LIVES, LOSES], [LIVES] * 3, "no difference was seen"),
        ([DIES, LIVES, LIVES], [LIVES] * 3, [LIVES] * 3, "no difference was seen"),
        ([GAINS_LESS] * 3, [LIVES] * 3, [LIVES] * 3, "costs reward"),
        ([DIES] * 3, [LIVES] * 3, [LIVES, LIVES, LOSES], "not judged, as BF16"),
    ],
)
def test_training_breaks_or_costs(
    noqat: list[Outcome], qat: list[Outcome], bf16: list[Outcome], answer: str
) -> None:
    assert detail_of((noqat, qat, bf16), "group").startswith(answer)


def test_gains_and_their_difference_are_shown() -> None:
    noqat = [LIVES._replace(gain=gain) for gain in (0.0, 0.1, 0.2)]
    detail = detail_of((noqat, [LIVES] * 3, [LIVES] * 3), "group")
    # t-interval of -0.2, -0.1 and 0: 4.303 times 0.1 over the root of 3
    assert detail.endswith(
        "gain of reward: nvfp4-noqat +0.100, nvfp4-qat +0.200, bf16 +0.200; "
        "no QAT less QAT -0.100 (-0.348 to +0.148)"
    )


def test_rates_without_an_arm_are_not_asked_about() -> None:
    settings = [Setting("dense", arm, RATE) for arm in ARMS if arm != QAT]
    design = Design("dense", None, (RATE,), frozenset(settings))
    assert descriptive_rules_of(design, num_seeds=3) == {}
