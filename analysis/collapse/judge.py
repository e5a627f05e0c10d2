"""The claims about a study of collapses, with what a reader must know of its runs.

Only cells that have all their runs are judged; the table names the others.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path

from analysis.claim_rows import ONE_CHECKPOINT, is_pretrained, numbers_of
from analysis.claims_table import Claim, ClaimsTable
from analysis.collapse.comparison import Comparison
from analysis.collapse.few_seeds import FEWEST_FOR_TESTS, descriptive_rules_of
from analysis.collapse.grid import Design, Grid, design_of, read_grid, runs_by_setting
from analysis.collapse.rules import AREA_LEVEL, Judged, Rule, rules_of
from analysis.collapse.survival import NUM_DRAWN, WINDOW, takes_all_divisions, takes_all_signs
from analysis.load import metric_of, read_metrics
from experiments.rl.metric_names import REWARD
from experiments.runs.evaluation import EVALUATIONS
from experiments.runs.manifest import MANIFEST, read_manifest
from experiments.runs.record import file_of, has_file
from experiments.study.schema import Run, Study
from experiments.support.json_files import REMAKE

DEFINITION = (
    "A run has collapsed when the mean reward of 20 steps falls below half of its best. Claims "
    "that need a cell without all its runs are NOT RUN."
)
P_VALUES = "p: two-sided log-rank test with its {} permutation distribution over the seeds."
CORRECTED = (
    " The p-values behind C1 to C3 are corrected together after Holm; the others are secondary and "
    "not corrected."
)
C4_DECIDES = " C4 is primary, all else secondary and not corrected."
ON_REWARDS = {
    "C4": C4_DECIDES + " C4 and C10 are of differences by seed; p of C10 is of {} changes of "
    "signs. C11 is of shares of runs.",
    "C9": CORRECTED + " C9 is primary. C9 and C10 are of differences by seed; their p is of {} "
    "changes of signs.",
}
NO_TEST = (
    f"Fewer than {FEWEST_FOR_TESTS} seeds: nothing is tested, and the answer follows the rule that "
    "docs/protocols/collapse.md gave before the runs."
)
# nothing was trained without QAT
OF_TWO_ARMS = C4_DECIDES + " C4 is of differences by seed, C11 of shares of runs."
OF_EXACT_ARMS = (
    "C12 is primary, all else secondary and not corrected. C12 and C13 are of shares of runs, C14 "
    "of differences by seed: docs/protocols/collapse-exact.md."
)
GRAD_NORM = "actor/grad_norm"


def judge_study(study: Study, results: Path) -> ClaimsTable:
    """All claims that a study can make, in a results or records folder.

    Of few seeds these are what its protocol asks, without a test.
    """
    design, runs = design_of(study), runs_by_setting(study, results)
    grid, num_seeds = read_grid(runs, results), len(study.seeds)
    is_tested = num_seeds >= FEWEST_FOR_TESTS
    rules = rules_of(design) if is_tested else descriptive_rules_of(design, num_seeds)
    how = _tests(design.primary if design.primary in rules else "", rules, num_seeds)
    return ClaimsTable(
        study=study.study,
        claims=judge_grid(grid, design, rules, num_seeds),
        marks={design.dense: marks(study, list(chain(*runs.values())), results)},
        collapsed_at={
            run.id: outcome.collapsed
            for setting, its in runs.items()
            for run, outcome in zip(its, grid[setting], strict=True)
            if outcome.collapsed is not None
        },
        level=AREA_LEVEL,
        note=f"{DEFINITION} {how if is_tested else NO_TEST}",
    )


def _tests(primary: str, rules: Collection[str], num_seeds: int) -> str:
    """How p-values come about, and which claim of `rules` decides."""
    if {"C12", "C13"}.intersection(rules):
        return OF_EXACT_ARMS
    is_exact = takes_all_divisions(2 * num_seeds, num_seeds)
    p_values = P_VALUES.format("exact" if is_exact else f"sampled ({NUM_DRAWN:,} divisions)")
    if primary == "C4" and "C10" not in rules:
        return p_values + OF_TWO_ARMS
    every = "all" if takes_all_signs(num_seeds) else f"{NUM_DRAWN:,}"
    return p_values + ON_REWARDS.get(primary, CORRECTED).format(every)


def judge_grid(
    grid: Grid, design: Design, rules: Mapping[str, Rule], num_seeds: int
) -> tuple[Claim, ...]:
    """A claim by each rule."""
    runs, claims = Comparison(grid, design), []
    for name, rule in rules.items():
        if missing := [setting for setting in rule.needs if setting not in grid]:
            judged = Judged("NOT RUN", f"not all runs are at their last step: {missing[0]}")
        else:
            judged = rule.judge_runs(runs)
        claims.append(
            Claim(
                model=design.dense,
                name=name,
                statement=f"{name}: {rule.statement}",
                **numbers_of(judged.interval, judged.required),
                verdict=judged.verdict,
                num_seeds=num_seeds,
                unit="",
                detail=judged.detail,
            )
        )
    return tuple(claims)


def marks(study: Study, runs: Sequence[Run], results: Path) -> tuple[str, ...]:
    """What a reader must know of the runs of complete cells before any verdict."""
    folders = [results / run.id for run in runs]
    manifests = [read_manifest(folder, REMAKE) for folder in folders]
    found = [ONE_CHECKPOINT] if any(is_pretrained(study, name) for name in study.models) else []
    complete = {run.cell for run in runs}
    if missing := [cell for cell in study.cells if cell not in complete]:
        found.append(f"cells not complete, not judged: {', '.join(missing)}")
    bases: dict[tuple[str, int], set[str]] = {}
    for folder, it in zip(folders, manifests, strict=True):
        if "base" not in it.digests:
            raise ValueError(f"{file_of(folder, MANIFEST)}: digests.base: missing; {REMAKE}")
        bases.setdefault((it.model, it.seed), set()).add(it.digests["base"])
    most = max(map(len, bases.values()), default=0)
    if most > 1:
        found.append(f"{most} generations of base checkpoints, one for all arms of a cell")
    if stopped := sum(it.was_stopped for it in manifests):
        found.append(f"{stopped} of {len(manifests)} runs stopped before their last step")
    if resumed := sum(it.attempt > 1 for it in manifests):
        found.append(f"{resumed} of {len(manifests)} runs cut off and begun again or resumed")
    metrics = [read_metrics(folder) for folder in folders]
    if never := sum(not its[REWARD].any() for its in metrics):
        found.append(
            f"{never} of {len(metrics)} runs were never rewarded: collapsed at step {WINDOW}"
        )
    norms = [metric_of(its, GRAD_NORM, str(it)) for its, it in zip(metrics, folders, strict=True)]
    if skipped := sum(int(its.isna().sum()) for its in norms):
        found.append(f"{skipped} of {sum(map(len, norms))} updates skipped: gradient not finite")
    if without := sum(not has_file(folder, EVALUATIONS) for folder in folders):
        found.append(f"{without} of {len(folders)} runs lack their offline accuracies")
    if any(it.git is None or it.git.dirty for it in manifests):
        found.append("code had uncommitted changes")
    return tuple(found)
