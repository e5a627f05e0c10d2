"""What studies with too few seeds for a test are asked, and how it is answered: in words.

docs/protocols/collapse.md, sections on `collapse-vllm` and `collapse-smollm2`. With plain rewards
the decisive cell is run once more somewhere else: does the difference between the arms come back?
With group-centred advantages the model is another one: does training without QAT break, or cost?
"""

from collections.abc import Callable
from functools import partial
from statistics import fmean

from analysis.collapse.comparison import Comparison
from analysis.collapse.grid import BF16, NOQAT, QAT, Design, num_collapsed, show_rate
from analysis.collapse.rules import Judged, Rule
from analysis.collapse.survival import Outcome, paired_difference, show_difference

FEWEST_FOR_TESTS = 5
MORE = 2  # collapsed runs, for a difference; and runs that break
LEVEL = 0.95
ARMS = (NOQAT, QAT, BF16)


def descriptive_rules_of(design: Design, num_seeds: int) -> dict[str, Rule]:
    """What is reported at the learning rates at which all arms are planned.

    Of a single seed that is only what became of its runs.
    """
    if num_seeds == 1:
        statement, answer = "runs that collapse", _collapsed
    elif design.advantage == "reward":
        statement, answer = "the difference between the arms comes back", _comes_back
    else:
        statement, answer = "training without QAT breaks, or costs reward", _breaks
    rules = {
        f"at {show_rate(lr)}": Rule(
            statement, partial(_reported, answer, lr), [design.plain(arm, lr) for arm in ARMS]
        )
        for lr in design.lrs
    }
    return {name: it for name, it in rules.items() if design.settings.issuperset(it.needs)}


def _reported(answer: Callable[[Comparison, float], str], lr: float, runs: Comparison) -> Judged:
    return Judged("REPORTED", answer(runs, lr))


def _collapsed(runs: Comparison, lr: float) -> str:
    return runs.collapsed(*(runs.at(arm, lr) for arm in ARMS))


def _comes_back(runs: Comparison, lr: float) -> str:
    without, *others = (num_collapsed(runs.grid[runs.at(arm, lr)]) for arm in ARMS)
    if all(without >= other + MORE for other in others):
        found = "it comes back"
    elif any(without <= other for other in others):
        found = "it does not come back"
    else:
        found = "open"
    return f"{found}; {_collapsed(runs, lr)}"


def _breaks(runs: Comparison, lr: float) -> str:
    without, qat, bf16 = (runs.grid[runs.at(arm, lr)] for arm in ARMS)
    to_qat = paired_difference([it.gain for it in without], [it.gain for it in qat], LEVEL)
    if any(map(_is_broken, bf16)):
        found = "not judged, as BF16 collapses or loses reward in a seed"
    elif sum(map(_is_broken, without)) >= MORE and not any(map(_is_broken, qat)):
        found = "breaks"
    else:
        costs = to_qat.high is not None and to_qat.high < 0
        found = "costs reward" if costs else "no difference was seen"
    gains = ", ".join(
        f"{arm} {fmean(it.gain for it in outcomes):+.3f}"
        for arm, outcomes in zip(ARMS, (without, qat, bf16), strict=True)
    )
    difference = show_difference(to_qat)
    return f"{found}; {_collapsed(runs, lr)}; gain of reward: {gains}; no QAT less QAT {difference}"


def _is_broken(run: Outcome) -> bool:
    return run.collapsed is not None or run.gain < 0
