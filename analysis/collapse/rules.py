"""Claims C1 to C14 of docs/protocols/collapse.md and collapse-exact.md: rules over a grid.

The highest learning rate of a study is the protocol's 3e-4, the second highest its 2e-4. A study
makes the claims whose settings it plans.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from analysis.claim_rows import Requirement, judge
from analysis.claims_table import ClaimVerdict
from analysis.collapse.comparison import Comparison, show_p
from analysis.collapse.grid import (
    BF16,
    BF16_EXACT,
    CORRECTIONS,
    FFN,
    NOQAT,
    QAT,
    QAT_EXACT,
    Design,
    Setting,
    num_collapsed,
    show_rate,
)
from analysis.collapse.survival import (
    difference_of_shares,
    paired_difference,
    show_difference,
    sign_flip_p,
    takes_all_signs,
)
from analysis.stats import Interval, Verdict
from experiments.study.protocol import COLLAPSE

AREA_MARGIN = COLLAPSE.reward_margin
AREA_LEVEL = COLLAPSE.interval_level
SHARE_MARGIN = COLLAPSE.share_margin
COLLAPSES_NO_MORE: Requirement = ("at most", SHARE_MARGIN)
COSTS: Requirement = ("at most", -AREA_MARGIN)
COSTS_NOTHING: Requirement = ("within", AREA_MARGIN)
FEWER: Requirement = ("at most", 0.0)


class Judged(NamedTuple):
    """What became of a claim."""

    verdict: ClaimVerdict
    detail: str
    # of level `AREA_LEVEL`, of a difference of mean rewards or shares, where one decides
    interval: Interval | None = None
    required: Requirement | None = None  # of that interval


def _earlier_than_both(runs: Comparison, noqat: Setting) -> Judged:
    """C1's rule: a setting without QAT is earlier than QAT and than BF16 at equal settings."""
    qat, bf16 = (noqat._replace(arm=arm) for arm in (QAT, BF16))
    to_qat, to_bf16 = runs.difference(noqat, qat), runs.difference(noqat, bf16)
    detail = f"{runs.collapsed(noqat, qat, bf16)}; p to QAT {to_qat}; to BF16 {to_bf16}"
    if to_qat.earlier and to_bf16.earlier:
        return Judged("PASS", detail)
    return Judged("FAIL" if to_qat.later or to_bf16.later else "INCONCLUSIVE", detail)


def _lower_critical_rate(runs: Comparison) -> Judged:
    rates = runs.critical_rates(NOQAT, BF16)
    detail = f"no QAT {show_rate(rates[NOQAT])}, BF16 {show_rate(rates[BF16])}"
    if rates[NOQAT] >= rates[BF16]:
        return Judged("FAIL", detail)
    tested = [lr for lr in runs.design.lrs[-2:] if lr > rates[NOQAT]]
    tests = {lr: runs.difference(runs.at(NOQAT, lr), runs.at(BF16, lr)) for lr in tested}
    shown = "; ".join(f"p at {show_rate(lr)} {test}" for lr, test in tests.items())
    is_shown = any(test.earlier for test in tests.values())
    return Judged("PASS" if is_shown else "INCONCLUSIVE", f"{detail}; {shown}")


def _survives_as_bf16(runs: Comparison) -> Judged:
    rates, lrs = runs.critical_rates(QAT, BF16), runs.design.lrs
    lost = {
        arm: sum(num_collapsed(runs.grid[runs.at(arm, lr)]) for lr in lrs) for arm in (QAT, BF16)
    }
    num_runs = sum(len(runs.grid[runs.at(QAT, lr)]) for lr in lrs)
    detail = (
        f"critical rate: QAT {show_rate(rates[QAT])}, BF16 {show_rate(rates[BF16])}; "
        f"collapsed: QAT {lost[QAT]}, BF16 {lost[BF16]} of {num_runs}"
    )
    if not any(rates.values()):
        detail += "; neither survives any rate, so that critical rates say nothing"
    if any(runs.difference(runs.at(QAT, lr), runs.at(BF16, lr)).earlier for lr in lrs):
        return Judged("FAIL", detail)
    no_worse = rates[QAT] >= rates[BF16] and lost[QAT] <= lost[BF16] + 1
    return Judged("PASS" if no_worse else "INCONCLUSIVE", detail)


def _reward_difference(runs: Comparison, one: Setting, other: Setting) -> Interval:
    """Mean reward of one setting less the other's, by seed."""
    first, second = ([outcome.area for outcome in runs.grid[it]] for it in (one, other))
    return paired_difference(first, second, AREA_LEVEL)


def _collapses_less(
    first: str, second: str, required: Requirement, than: str, runs: Comparison
) -> Judged:
    """The rule of C11 to C13, on the share of runs that collapse: of one arm less of another."""
    one, other = runs.at(first), runs.at(second)
    interval = difference_of_shares(runs.grid[one], runs.grid[other], AREA_LEVEL)
    detail = f"{runs.collapsed(one, other)}; share of runs less {than}"
    return Judged(judge(interval, required), detail, interval, required)


def _exact_costs_no_reward(runs: Comparison) -> Judged:
    """C14's rule: the mean rewards of exact QAT and QAT are close."""
    interval = _reward_difference(runs, runs.at(QAT_EXACT), runs.at(QAT))
    return Judged(
        judge(interval, COSTS_NOTHING), "mean reward less inexact QAT's", interval, COSTS_NOTHING
    )


def _costs_no_reward(runs: Comparison) -> Judged:
    intervals = {
        lr: _reward_difference(runs, runs.at(QAT, lr), runs.at(BF16, lr))
        for lr in _rates_of_c4(runs.design)
    }
    verdict = _worst([judge(it, COSTS_NOTHING) for it in intervals.values()])
    if len(intervals) == 1:
        (interval,) = intervals.values()
        return Judged(verdict, "mean reward less BF16's", interval, COSTS_NOTHING)
    return Judged(
        verdict,
        "; ".join(
            f"mean reward less BF16's at {show_rate(lr)}, {100 * AREA_LEVEL:g} % interval: "
            f"{show_difference(interval)}"
            for lr, interval in intervals.items()
        ),
    )


def _costs_reward(setting: Setting, runs: Comparison) -> Judged:
    """C9's and C10's rule: a setting's mean reward is below QAT's by more than the margin."""
    lesser, qat = runs.grid[setting], runs.grid[runs.at(QAT)]
    if [run.base for run in lesser] != [run.base for run in qat]:
        return Judged("INCONCLUSIVE", "not judged: the runs of a seed start from different bases")
    areas = [run.area for run in lesser], [run.area for run in qat]
    interval = paired_difference(*areas, AREA_LEVEL)
    num_lower = sum(first < second for first, second in zip(*areas, strict=True))
    detail = (
        f"mean reward less QAT's; lower in {num_lower} of {len(qat)} seeds, "
        f"{'exact ' if takes_all_signs(len(qat)) else ''}sign-flip p {show_p(sign_flip_p(*areas))}"
    )
    return Judged(judge(interval, COSTS), detail, interval, COSTS)


def _rates_of_c4(design: Design) -> tuple[float, ...]:
    """All but the highest, at which BF16 may collapse too; that one where there is no other."""
    return design.lrs[:-1] or design.lrs


def _corrections_between(runs: Comparison) -> Judged:
    verdicts: list[Verdict] = []
    details = []
    for label, corrected in _corrected(runs.design).items():
        to_none = runs.difference(corrected, runs.at(NOQAT))
        to_qat = runs.difference(corrected, runs.at(QAT))
        if to_none.earlier or to_qat.later:
            verdicts.append("FAIL")
        else:
            verdicts.append("PASS" if to_none.later and to_qat.earlier else "INCONCLUSIVE")
        outcomes = runs.grid[corrected]
        details.append(
            f"{label} {verdicts[-1]}: {num_collapsed(outcomes)} of {len(outcomes)} collapsed, "
            f"p to none {to_none}, to QAT {to_qat}"
        )
    return Judged(_worst(verdicts), "; ".join(details))


def _corrected(design: Design) -> dict[str, Setting]:
    """No QAT at the decisive rate with each correction that is planned there, by its label."""
    noqat = design.plain(NOQAT, design.decisive_lr)
    settings = {label: noqat._replace(correction=name) for name, label in CORRECTIONS.items()}
    return {label: setting for label, setting in settings.items() if setting in design.settings}


def _ffn_survives_as_full(runs: Comparison) -> Judged:
    ffn, qat = runs.at(FFN), runs.at(QAT)
    difference = runs.difference(ffn, qat)
    detail = f"{runs.collapsed(ffn, qat)}; p {difference}"
    if difference.earlier:
        return Judged("FAIL", detail)
    close = num_collapsed(runs.grid[ffn]) <= num_collapsed(runs.grid[qat]) + 1
    return Judged("PASS" if close else "INCONCLUSIVE", detail)


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    if "FAIL" in verdicts:
        return "FAIL"
    return "PASS" if set(verdicts) == {"PASS"} else "INCONCLUSIVE"


class Rule(NamedTuple):
    """A claim and how it is judged."""

    statement: str
    judge: Callable[[Comparison], Judged]
    needs: Sequence[Setting]  # settings whose runs the rule looks at
    is_no_worse: bool = False  # whether it says that an arm does no worse than another one

    def judge_runs(self, runs: Comparison) -> Judged:
        """As `judge`; but arms that are all lost do no worse than one another, and are not safe."""
        judged = self.judge(runs)
        outcomes = [it for setting in self.needs for it in runs.grid[setting]]
        if not self.is_no_worse or num_collapsed(outcomes) < len(outcomes):
            return judged
        verdict = "INCONCLUSIVE" if judged.verdict == "PASS" else judged.verdict
        detail = (
            f"{judged.detail}; every run compared collapses, so that nothing is shown to be safe"
        )
        return judged._replace(verdict=verdict, detail=detail)


def rules_of(design: Design) -> dict[str, Rule]:
    """The claims whose settings a design plans, by the protocol's names."""
    at, rates = f"at {show_rate(design.decisive_lr)}", _rates_of_c4(design)
    noqat, qat, ffn = (design.plain(arm, design.decisive_lr) for arm in (NOQAT, QAT, FFN))
    rules = {
        "C1": _c1(f"no QAT collapses earlier than QAT and BF16 {at}", noqat),
        "C3": Rule(
            "no earlier collapse with QAT than in BF16 seen",
            _survives_as_bf16,
            _plain(design, (QAT, BF16), design.lrs),
            is_no_worse=True,
        ),
        "C4": Rule(
            f"QAT's mean reward is within {AREA_MARGIN:g} of BF16's at "
            f"{' and '.join(map(show_rate, rates))}",
            _costs_no_reward,
            _plain(design, (QAT, BF16), rates),
            is_no_worse=True,
        ),
        "C8": Rule(
            f"no earlier collapse with FFN-only than full QAT seen {at}",
            _ffn_survives_as_full,
            (ffn, qat),
            is_no_worse=True,
        ),
    }
    if len(design.lrs) > 1:
        rules["C2"] = Rule(
            "no QAT has a lower critical rate than BF16",
            _lower_critical_rate,
            _plain(design, (NOQAT, BF16), design.lrs),
        )
    if corrected := _corrected(design):
        rules["C5"] = Rule(
            f"corrections delay collapse, less than QAT, {at}",
            _corrections_between,
            (noqat, qat, *corrected.values()),
        )
    if design.moe is not None:
        rules["C6"] = _c1(f"C1 for {design.moe} {at}", noqat._replace(model=design.moe))
    if design.advantage == "reward":
        rules["C7"] = _c1(
            f"C1 with group-centred advantages {at}", noqat._replace(advantage="group")
        )
    rules |= _rules_of_primary(design, at)
    in_order = sorted(rules, key=lambda name: int(name.removeprefix("C")))
    return {it: rules[it] for it in in_order if design.settings.issuperset(rules[it].needs)}


def _rules_of_primary(design: Design, at: str) -> dict[str, Rule]:
    """Those that belong to the claim that decides: C9 to C14."""
    noqat, qat = (design.plain(arm, design.decisive_lr) for arm in (NOQAT, QAT))
    rules = {}
    costs = f"costs over {AREA_MARGIN:g} of mean reward {at}"
    if design.primary == "C9":
        rules["C9"] = _c9(f"no QAT {costs}", noqat, qat)
    if design.primary in ("C4", "C9"):
        tis = noqat._replace(correction="token_tis")
        rules["C10"] = _c9(f"no QAT with TIS {costs}", tis, qat)
    if design.primary == "C4":
        rules["C11"] = Rule(
            f"QAT collapses at most {SHARE_MARGIN:g} more often than BF16 {at}",
            partial(_collapses_less, QAT, BF16, COLLAPSES_NO_MORE, "BF16's"),
            _plain(design, (QAT, BF16), (design.decisive_lr,)),
            is_no_worse=True,
        )
    if design.primary == "C12":
        rules |= _exact_rules(design, at)
    return rules


def _exact_rules(design: Design, at: str) -> dict[str, Rule]:
    """What exactness does to an arm: C12 to C14."""
    qat, bf16 = (
        _plain(design, arms, (design.decisive_lr,))
        for arms in ((QAT_EXACT, QAT), (BF16_EXACT, BF16))
    )
    return {
        "C12": Rule(
            f"exact QAT collapses less often than QAT {at}",
            partial(_collapses_less, QAT_EXACT, QAT, FEWER, f"that of {QAT}"),
            qat,
        ),
        "C13": Rule(
            f"exact BF16 collapses less often than BF16 {at}",
            partial(_collapses_less, BF16_EXACT, BF16, FEWER, f"that of {BF16}"),
            bf16,
        ),
        "C14": Rule(
            f"exact QAT's mean reward is within {AREA_MARGIN:g} of QAT's {at}",
            _exact_costs_no_reward,
            qat,
            is_no_worse=True,
        ),
    }


def _c1(statement: str, noqat: Setting) -> Rule:
    needs = [noqat._replace(arm=arm) for arm in (NOQAT, QAT, BF16)]
    return Rule(statement, lambda runs: _earlier_than_both(runs, noqat), needs)


def _c9(statement: str, setting: Setting, qat: Setting) -> Rule:
    return Rule(statement, partial(_costs_reward, setting), (setting, qat))


def _plain(design: Design, arms: Sequence[str], lrs: Sequence[float]) -> list[Setting]:
    return [design.plain(arm, lr) for arm in arms for lr in lrs]
