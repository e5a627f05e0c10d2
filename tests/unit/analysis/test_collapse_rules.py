"""The protocols' decision rules on outcomes that decide them; of three seeds, their questions."""

from collections.abc import Callable

import pytest

from analysis.collapse.comparison import Comparison
from analysis.collapse.few_seeds import ARMS, descriptive_rules_of
from analysis.collapse.grid import (
    BF16,
    BF16_EXACT,
    FFN,
    NOQAT,
    QAT,
    QAT_EXACT,
    Design,
    Grid,
    Setting,
)
from analysis.collapse.judge import judge_grid
from analysis.collapse.rules import rules_of
from analysis.collapse.survival import Outcome

LRS = (1e-4, 2e-4, 3e-4)
DENSE, MOE = "dense", "moe"


def lived(area: float = 0.9) -> list[Outcome]:
    return [Outcome(None, 200, area + 0.001 * seed, 0.1) for seed in range(5)]


def died(first: int = 30) -> list[Outcome]:
    return [Outcome(first + 5 * seed, 200, 0.2, 0.1) for seed in range(5)]


def expected_grid() -> dict[Setting, list[Outcome]]:
    """What the protocol expects: at 3e-4 all runs without QAT die, corrected ones later."""
    grid = {Setting(DENSE, arm, lr): lived() for arm in (BF16, NOQAT, QAT) for lr in LRS}
    grid[Setting(DENSE, NOQAT, 3e-4)] = died()
    for correction in ("token_tis", "sequence_mask", "score_centering"):
        grid[Setting(DENSE, NOQAT, 3e-4, correction)] = died(120)
    grid[Setting(DENSE, FFN, 3e-4)] = lived()
    for arm in (BF16, NOQAT, QAT):
        outcomes = died() if arm == NOQAT else lived()
        grid[Setting(MOE, arm, 3e-4)] = outcomes
        grid[Setting(DENSE, arm, 3e-4, advantage="group")] = outcomes
    return grid


TIS = (NOQAT, 3e-4, "token_tis")
DESIGN = Design(DENSE, MOE, LRS, frozenset(expected_grid()))


def verdicts(grid: Grid, design: Design = DESIGN) -> dict[str, str]:
    judged = judge_grid(grid, design, rules_of(design), num_seeds=5)
    return {claim.name: claim.verdict for claim in judged}


def test_the_expected_outcome_passes_all() -> None:
    assert set(verdicts(expected_grid()).values()) == {"PASS"}


@pytest.mark.parametrize(
    ("changed", "claim", "verdict"),
    [
        pytest.param({(QAT, 3e-4): died()}, "C1", "INCONCLUSIVE", id="QAT dies as well"),
        pytest.param(
            {(NOQAT, 3e-4): lived(), (QAT, 3e-4): died(), (BF16, 3e-4): died()},
            "C1",
            "FAIL",
            id="the others die",
        ),
        pytest.param({(BF16, 3e-4): died()}, "C2", "FAIL", id="equal critical rates"),
        pytest.param(
            {(NOQAT, 3e-4): [*lived()[:4], *died()[:1]]}, "C2", "INCONCLUSIVE", id="one of five"
        ),
        pytest.param({(QAT, 3e-4): died()}, "C3", "FAIL", id="QAT dies, BF16 does not"),
        pytest.param(
            {(QAT, 3e-4): [*lived()[:3], *died()[:2]]}, "C3", "INCONCLUSIVE", id="two of QAT die"
        ),
        pytest.param({(QAT, 2e-4): lived(0.8)}, "C4", "FAIL", id="QAT costs a tenth"),
        pytest.param({(QAT, 2e-4): lived(0.87)}, "C4", "PASS", id="QAT costs 0.03"),
        pytest.param(
            {(QAT, 2e-4): [Outcome(None, 200, a, 0.1) for a in (0.7, 1.0, 0.8, 0.95, 0.9)]},
            "C4",
            "INCONCLUSIVE",
            id="seeds differ",
        ),
        pytest.param({TIS: died()}, "C5", "INCONCLUSIVE", id="TIS is no help"),
        pytest.param({TIS: died(21)}, "C5", "INCONCLUSIVE", id="TIS dies a little earlier"),
        pytest.param({TIS: [Outcome(20, 200, 0.1, 0.1)] * 5}, "C5", "FAIL", id="worse than none"),
        pytest.param({TIS: lived()}, "C5", "INCONCLUSIVE", id="TIS is as good as QAT"),
        pytest.param({(FFN, 3e-4): died()}, "C8", "FAIL", id="FFN-only dies"),
    ],
)
def test_verdicts(changed: dict[tuple, list[Outcome]], claim: str, verdict: str) -> None:
    grid = expected_grid()
    grid |= {Setting(DENSE, *rest): outcomes for rest, outcomes in changed.items()}
    assert verdicts(grid)[claim] == verdict


def test_a_missing_cell_leaves_only_its_claims_open() -> None:
    grid = expected_grid()
    del grid[Setting(MOE, BF16, 3e-4)], grid[Setting(DENSE, NOQAT, 3e-4, "token_tis")]
    open_claims = {name for name, verdict in verdicts(grid).items() if verdict == "NOT RUN"}
    assert open_claims == {"C5", "C6"}


def test_a_study_makes_the_claims_that_its_settings_allow() -> None:
    """One rate, one correction: no critical rates, and no word of cells that are not planned."""
    grid = {Setting(DENSE, arm, 6e-4): lived() for arm in (BF16, QAT)}
    grid[Setting(DENSE, NOQAT, 6e-4)] = died()
    grid[Setting(DENSE, NOQAT, 6e-4, "token_tis")] = died(120)
    judged = verdicts(grid, Design(DENSE, None, (6e-4,), frozenset(grid)))
    assert judged == dict.fromkeys(("C1", "C3", "C4", "C5"), "PASS")


@pytest.mark.parametrize(
    ("is_left_out", "claims"),
    [
        pytest.param(lambda it: it.arm == QAT, {"C2"}, id="no arm with QAT"),
        pytest.param(lambda it: it.arm == NOQAT, {"C3", "C4", "C8"}, id="no arm without QAT"),
        pytest.param(
            lambda it: (it.model, it.arm) == (MOE, QAT),
            {"C1", "C2", "C3", "C4", "C5", "C7", "C8"},
            id="no QAT in the MoE",
        ),
        pytest.param(
            lambda it: it.correction != "none",
            {"C1", "C2", "C3", "C4", "C6", "C7", "C8"},
            id="no correction",
        ),
    ],
)
def test_claims_about_settings_that_are_not_planned_are_not_made(
    is_left_out: Callable[[Setting], bool], claims: set[str]
) -> None:
    grid = {it: outcomes for it, outcomes in expected_grid().items() if not is_left_out(it)}
    design = DESIGN._replace(settings=frozenset(grid))
    for runs, verdict in ((grid, "PASS"), ({}, "NOT RUN")):
        assert verdicts(runs, design) == dict.fromkeys(claims, verdict)


def test_corrections_at_another_rate_are_not_those_of_c5() -> None:
    at_3e4 = Setting(DENSE, NOQAT, 3e-4, "token_tis")
    grid = {it: outcomes for it, outcomes in expected_grid().items() if it.correction == "none"}
    grid[at_3e4._replace(lr=2e-4)] = died()
    assert "C5" not in verdicts(grid, DESIGN._replace(settings=frozenset(grid)))


def test_an_error_of_a_rule_is_no_missing_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr("analysis.collapse.rules.paired_difference", broken)
    with pytest.raises(KeyError, match="a mistake"):
        verdicts(expected_grid())


def group_centred() -> dict[Setting, list[Outcome]]:
    return {
        setting._replace(advantage="group"): outcomes
        for setting, outcomes in expected_grid().items()
        if setting.model == DENSE and setting.advantage == "reward"
    }


def verdicts_of_group_centred(grid: Grid) -> dict[str, str]:
    return verdicts(grid, Design(DENSE, None, LRS, frozenset(grid), "group", "C9"))


def test_a_grid_of_group_centred_advantages_is_judged_by_rewards_too() -> None:
    claims = ("C1", "C2", "C3", "C4", "C5", "C8", "C9", "C10")
    assert verdicts_of_group_centred(group_centred()) == dict.fromkeys(claims, "PASS")


@pytest.mark.parametrize(
    ("arm", "correction", "runs", "expected"),
    [
        pytest.param(NOQAT, "none", lived(0.80), {"C9": "PASS"}, id="costs a tenth"),
        pytest.param(NOQAT, "none", lived(0.87), {"C9": "FAIL"}, id="costs 0.03"),
        pytest.param(
            NOQAT, "none", [*lived()[:3], *died()[:2]], {"C9": "INCONCLUSIVE"}, id="in two seeds"
        ),
        pytest.param(NOQAT, "token_tis", lived(), {"C9": "PASS", "C10": "FAIL"}, id="as QAT"),
        pytest.param(QAT, "none", died(), {"C9": "FAIL", "C10": "FAIL"}, id="QAT dies as well"),
    ],
)
def test_what_training_without_qat_costs(
    arm: str, correction: str, runs: list[Outcome], expected: dict[str, str]
) -> None:
    """The seeds differ, and the whole interval has to lie on one side of the margin."""
    changed = [it._replace(area=it.area + 0.01 * (-1) ** seed) for seed, it in enumerate(runs)]
    grid = group_centred() | {Setting(DENSE, arm, 3e-4, correction, "group"): changed}
    judged = verdicts_of_group_centred(grid)
    assert {name: judged[name] for name in expected} == expected


@pytest.mark.parametrize(("primary", "is_judged"), [("C1", False), ("C9", True)])
@pytest.mark.parametrize("advantage", ["reward", "group"])
def test_rewards_are_judged_where_the_study_says_so(
    advantage: str, primary: str, is_judged: bool
) -> None:
    grid = {setting._replace(advantage=advantage): its for setting, its in group_centred().items()}
    design = Design(DENSE, None, LRS, frozenset(grid), advantage, primary)
    assert (verdicts(grid, design).get("C9") == "PASS") == is_judged


def test_seeds_with_different_bases_are_not_paired() -> None:
    grid = group_centred()
    tis = Setting(DENSE, NOQAT, 3e-4, "token_tis", "group")
    grid[tis] = [run._replace(base="of another machine") for run in grid[tis]]
    judged = verdicts_of_group_centred(grid)
    assert (judged["C9"], judged["C10"]) == ("PASS", "INCONCLUSIVE")


def safety_grid(qat_collapsed: int) -> dict[Setting, list[Outcome]]:
    """QAT, BF16 and token TIS at one rate, 45 seeds, of which so many collapse with QAT."""
    bf16 = [Outcome(None, 240, 0.8 + 0.001 * seed, 0.1) for seed in range(45)]
    qat = [Outcome(50, 240, it.area, 0.1) for it in bf16[:qat_collapsed]] + bf16[qat_collapsed:]
    tis = [it._replace(area=it.area - 0.01) for it in bf16]
    cells = {(QAT, "none"): qat, (BF16, "none"): bf16, (NOQAT, "token_tis"): tis}
    return {Setting(DENSE, arm, 2e-4, correction): its for (arm, correction), its in cells.items()}


@pytest.mark.parametrize(
    ("qat_collapsed", "c3", "c11"),
    [(0, "PASS", "PASS"), (2, "INCONCLUSIVE", "INCONCLUSIVE"), (10, "FAIL", "FAIL")],
)
def test_a_study_of_safety_asks_for_rewards_and_shares(
    qat_collapsed: int, c3: str, c11: str
) -> None:
    grid = safety_grid(qat_collapsed)
    design = Design(DENSE, None, (2e-4,), frozenset(grid), primary="C4")
    expected = {"C3": c3, "C4": "PASS", "C10": "FAIL", "C11": c11}
    assert verdicts(grid, design) == expected


def test_p_values_are_corrected_for_tests_that_are_planned_and_not_made_yet() -> None:
    grid = expected_grid()
    at_once, settings = (
        Comparison(grid, DESIGN),
        (DESIGN.plain(NOQAT, 3e-4), DESIGN.plain(QAT, 3e-4)),
    )
    del grid[DESIGN.plain(BF16, 2e-4)], grid[DESIGN.plain(BF16, 3e-4)]
    before = Comparison(grid, DESIGN).difference(*settings)
    assert before.p_value == pytest.approx(4 * before.raw_p_value)
    assert before.p_value >= at_once.difference(*settings).p_value


def test_arms_that_all_collapse_are_not_safe() -> None:
    grid = {setting: died() for setting in safety_grid(0)}
    design = Design(DENSE, None, (2e-4,), frozenset(grid), primary="C4")
    claims = judge_grid(grid, design, rules_of(design), num_seeds=5)
    said = {it.name: it.verdict for it in claims if "nothing is shown to be safe" in it.detail}
    assert said == dict.fromkeys(("C3", "C4", "C11"), "INCONCLUSIVE")


@pytest.mark.parametrize(
    ("collapsed", "exact_collapsed", "c12"),
    [(14, 1, "PASS"), (1, 14, "FAIL"), (14, 10, "INCONCLUSIVE"), (0, 0, "INCONCLUSIVE")],
)
def test_exact_arms_are_judged_by_shares_of_runs_that_collapse(
    collapsed: int, exact_collapsed: int, c12: str
) -> None:
    alive = [Outcome(None, 240, 0.8 + 0.001 * seed, 0.1) for seed in range(72)]
    dead = [it._replace(collapsed=50) for it in alive]
    grid = {
        Setting(DENSE, arm, 2e-4): dead[:count] + alive[count:]
        for arm, count in ((QAT, collapsed), (QAT_EXACT, exact_collapsed))
    }
    design = Design(DENSE, None, (2e-4,), frozenset(grid), primary="C12")
    assert verdicts(grid, design) == {"C12": c12, "C14": "PASS"}
    of_bf16 = {it._replace(arm={QAT: BF16, QAT_EXACT: BF16_EXACT}[it.arm]): grid[it] for it in grid}
    design = design._replace(settings=frozenset(of_bf16))
    assert verdicts(of_bf16, design) == {"C13": c12}


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
