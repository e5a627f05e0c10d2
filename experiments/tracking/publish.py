"""Adds what is known only after training to MLflow's view: evaluations, claims and figures.

MLflow holds an experiment a study and in it a run a run id across all its attempts, tagged with it.
A judged study has more: a run an arm, above its seeds, with means, mean curves, and intervals in
its note; and a run "study": claims and the number of each verdict as metrics, figures as artifacts,
and as its note what a reader must know of the runs, then the claims.
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from math import isfinite
from pathlib import Path
from statistics import fmean

from mlflow import MlflowClient
from mlflow.entities import Metric, Run

from experiments.rl.metric_names import STEP_TIME
from experiments.runs.attempts import list_run_dirs, read_history
from experiments.runs.evaluation import EVALUATIONS, read_evaluations
from experiments.runs.manifest import RunManifest, read_manifest
from experiments.runs.metrics import Row
from experiments.runs.provenance import digest_file, digest_json
from experiments.runs.record import has_file, record_of
from experiments.runs.summary import KEYS, ArmSummary, summarize
from experiments.study.load import load_study
from experiments.support.json_files import REMAKE, write_json
from experiments.tracking.glance import (
    CELL_COLORS,
    CHARTS,
    COLLAPSED,
    COLOR,
    COLORS,
    NOTE,
    PARENT,
    columns,
    save_view,
    short_name,
)
from experiments.tracking.judged import Judged, JudgedClaim, read_judged
from experiments.tracking.live import STATUS, TrackedRun, ended_ms, milliseconds, now_ms
from experiments.tracking.store import (
    RUN_TAG,
    connect,
    explained_errors,
    find_or_create_experiment,
    find_runs,
    search_runs,
    store_uri,
)

STUDY_RUN = "study"
RECORDED_STEPS = 50  # at most, of a record's run
# which file a run's accuracies, and a study's claims, are of
EVALUATIONS_TAG, CLAIMS_TAG = "evaluations_sha256", "claims_sha256"


def rebuild_run(run_dir: Path) -> str:
    """Makes the MLflow run of a run's folder from its files; returns its id.

    The run is closed last: one whose making was interrupted is still open.
    """
    manifest, rows = read_history(run_dir)
    tracked = TrackedRun(manifest.study, manifest.run)
    tracked.start(manifest, resumes=False)
    timestamps_ms = _timestamps_ms(manifest, rows)
    if record_of(run_dir):  # its tables have all; a store of all steps of a grid has 200 MB
        shown = slice(None, None, -(-len(rows) // RECORDED_STEPS) or None)
        tracked.log_rows(rows[::-1][shown], timestamps_ms[::-1][shown])  # the last one with them
    else:
        tracked.log_rows(rows, timestamps_ms)
    if tracked.failure is None:
        publish_results(tracked.client, tracked.run_id, run_dir)
    tracked.finish(manifest)
    if tracked.failure is not None:
        raise ValueError(f"{store_uri()}: MLflow refused {run_dir}: {tracked.failure}")
    return tracked.run_id


def is_whole(client: MlflowClient, run: Run, manifest: RunManifest, rows: Sequence[Row]) -> bool:
    """Whether MLflow's run is this very one, no earlier one of its name, with each of its steps.

    One that is being trained may lack some.
    """
    own = {"started_at": manifest.started_at, "attempt": str(manifest.attempt)}
    if not own.items() <= run.data.tags.items() or run.info.status != STATUS[manifest.status]:
        return False
    steps = {int(row["step"] or 0) for row in rows if row.get(STEP_TIME) is not None}
    history = client.get_metric_history(run.info.run_id, STEP_TIME)
    return manifest.status == "running" or steps <= {point.step for point in history}


def evaluations_digest(run_dir: Path) -> str | None:
    """Of a run's evaluations, whatever form they have; None if there are none."""
    if not has_file(run_dir, EVALUATIONS):
        return None
    return digest_json([it.model_dump(mode="json") for it in read_evaluations(run_dir, REMAKE)])


def publish_results(client: MlflowClient, run_id: str, run_dir: Path) -> None:
    """Adds a run's offline accuracies and its summary, where it has been evaluated."""
    if not has_file(run_dir, EVALUATIONS):
        return
    moment_ms, evaluations = now_ms(), read_evaluations(run_dir, REMAKE)
    metrics = [
        Metric(f"eval/{it.precision}/{it.decoding}", it.accuracy, moment_ms, it.step)
        for it in evaluations
    ]
    summary = columns(summarize(run_dir))
    metrics += [Metric(key, value, moment_ms, 0) for key, value in summary.items()]
    client.log_batch(run_id, metrics=metrics)
    client.set_tag(run_id, EVALUATIONS_TAG, evaluations_digest(run_dir))


def publish_study(study_dir: Path, results: Path) -> None:
    """Makes the runs of the arms, which come first in the view, and of the study itself."""
    claims = study_dir / "claims.json"
    judged = read_judged(claims)
    runs = _readable_runs(judged.study, results)
    client = connect()
    experiment_id = find_or_create_experiment(client, judged.study)
    for previous in find_runs(client, experiment_id, STUDY_RUN):
        client.delete_run(previous)
    start_ms = min((milliseconds(run.started_at) for run in runs), default=now_ms())
    end_ms = max(map(ended_ms, runs), default=now_ms())
    tags = {RUN_TAG: STUDY_RUN, NOTE: _note(judged), CLAIMS_TAG: digest_file(claims)}
    # MLflow orders by date: arms as in the study, then the study's own run
    last_ms = start_ms + len(judged.arms)
    run_id = client.create_run(experiment_id, last_ms, tags, STUDY_RUN).info.run_id
    client.log_batch(run_id, metrics=_claims_as_metrics(judged.claims, end_ms))
    for path in (claims, study_dir / "claims.md"):
        if path.exists():
            client.log_artifact(run_id, str(path))
    if (study_dir / "figures").is_dir():
        client.log_artifacts(run_id, str(study_dir / "figures"), "figures")
    for run, step in judged.collapsed_at.items():
        for tracked in find_runs(client, experiment_id, run):
            client.log_metric(tracked, COLLAPSED, 1, step=step)
    for position, arm in enumerate(judged.arms):
        tags[NOTE] = _note_of_arm(arm)
        name = short_name(arm.model, arm.arm, arm.cell)
        arm_id = client.create_run(experiment_id, start_ms + position, tags, name).info.run_id
        _fill_arm(client, experiment_id, arm_id, arm, judged, results)
        client.set_terminated(arm_id, end_time=end_ms)
    save_view(client, experiment_id)
    verdicts = Counter(it.verdict for it in judged.claims)
    counted = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    client.set_experiment_tag(experiment_id, NOTE, f"Claims: {counted}\n\n{_note(judged)}")
    client.set_terminated(run_id, end_time=end_ms)


def _fill_arm(
    client: MlflowClient,
    experiment_id: str,
    arm_id: str,
    arm: ArmSummary,
    judged: Judged,
    results: Path,
) -> None:
    """Means over seeds, the mean of each chart's metric by step, and the seeds beneath."""
    values = columns({key: it.estimate for key, it in arm.estimates.items()})
    if judged.collapsed_at:
        values[COLLAPSED] = sum(run in judged.collapsed_at for run in arm.runs)
    moment_ms = now_ms()
    metrics = [Metric(key, it, moment_ms, 0) for key, it in values.items() if isfinite(it)]
    by_step: dict[tuple[str, int], list[float]] = {}
    for row in (row for run in arm.runs for row in read_history(results / run)[1]):
        for key in CHARTS:
            if (value := row.get(key)) is not None:
                by_step.setdefault((key, int(row["step"] or 0)), []).append(value)
    metrics += [Metric(key, fmean(its), moment_ms, step) for (key, step), its in by_step.items()]
    client.log_batch(arm_id, metrics=metrics)
    color = {COLOR: _color(arm, judged.arms)}
    # runs of a study that was renamed are in the experiment of its old name
    found = (find_runs(client, experiment_id, run)[:1] for run in arm.runs)
    for tracked in (arm_id, *chain.from_iterable(found)):
        parent = {} if tracked == arm_id else {PARENT: arm_id}
        for key, it in (color | parent).items():
            client.set_tag(tracked, key, it)


def _color(arm: ArmSummary, arms: Sequence[ArmSummary]) -> str:
    """The arm's own in its first cell."""
    firsts = {(it.model, it.arm): it for it in reversed(arms)}.values()
    others = [it for it in arms if it not in firsts]
    in_turn = others.index(arm) if arm in others else None
    return COLORS[arm.arm] if in_turn is None else CELL_COLORS[in_turn % len(CELL_COLORS)]


def _note_of_arm(arm: ArmSummary) -> str:
    """Means and 95 % intervals over the seeds, as Markdown."""
    lines = [
        f"{arm.model}, {arm.arm}{', ' * bool(arm.cell)}{arm.cell or ''}: {len(arm.runs)} seeds"
    ]
    for key, it in arm.estimates.items():
        interval = "" if it.low is None else f" ({it.low:.3g} to {it.high:.3g})"
        lines.append(f"* {KEYS[key]}: {it.estimate:.3g}{interval}")
    return "\n".join(lines)


def _readable_runs(study: str, results: Path) -> list[RunManifest]:
    """The manifests of a study's runs, without those that are damaged."""
    found = []
    for run_dir in list_run_dirs(results):
        with suppress(ValueError):  # who reads that run says so
            found.append(read_manifest(run_dir, REMAKE))
    return [it for it in found if it.study == study]


def _note(judged: Judged) -> str:
    """What a reader must know of the runs, then the claims, as Markdown."""
    marks = [f"* {model}: {'; '.join(found)}" for model, found in judged.marks.items() if found]
    return "\n".join([*marks, *map(_line, judged.claims)])


def _claims_as_metrics(claims: Sequence[JudgedClaim], moment_ms: int) -> list[Metric]:
    """Estimates that are finite, and how many claims have which verdict."""
    estimates = {
        f"claims/{it.model}/{it.name}": it.estimate for it in claims if it.estimate is not None
    }
    verdicts = Counter(f"verdicts/{it.verdict}" for it in claims)
    values = estimates | verdicts
    return [Metric(key, it, moment_ms, 0) for key, it in values.items() if isfinite(it)]


def _line(claim: JudgedClaim) -> str:
    """A claim in one line of Markdown."""
    head = f"* **{claim.verdict}** {claim.model}, {claim.statement}"
    if claim.estimate is None:
        return f"{head}: {claim.detail}"
    has_interval = claim.low is not None and claim.high is not None
    interval = f" ({claim.low:.3g} to {claim.high:.3g})" if has_interval else ""
    required = f", {claim.bound} {claim.threshold:g}" if claim.threshold is not None else ""
    return f"{head}: {claim.estimate:.3g}{interval}{required}"


def publish(study_file: Path, results: Path, out: Path) -> None:
    """Adds what is known only after training; writes the ids of the MLflow runs to `out`."""
    study = load_study(study_file)
    client = connect()
    experiment_id = find_or_create_experiment(client, study.study)
    published = {}
    for run in study.runs:
        found, run_dir = search_runs(client, experiment_id, run.id), results / run.id
        # not where the store was lost, or did not answer during the run or an earlier attempt
        if found and is_whole(client, found[0], *read_history(run_dir)):
            published[run.id] = str(found[0].info.run_id)
            publish_results(client, published[run.id], run_dir)
        else:
            published[run.id] = rebuild_run(run_dir)
    publish_study(out.parent, results)
    write_json(out, published)


def _timestamps_ms(manifest: RunManifest, rows: Iterable[Row]) -> list[int]:
    """When the steps ended, from the run's start and their durations."""
    moment_ms, timestamps = float(milliseconds(manifest.started_at)), []
    for row in rows:
        moment_ms += 1000 * (row.get(STEP_TIME) or 0.0)
        timestamps.append(int(moment_ms))
    return timestamps


def main(args: argparse.Namespace) -> None:
    """Adds what the command line names."""
    with explained_errors():
        connect()  # a store that is none is named here, and not as the failure of a run
        publish(args.study, args.results, args.out)
