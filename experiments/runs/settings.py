"""Runs of a study, read as such: what was made with other settings is refused, and named."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from experiments.rl.config import GrpoConfig
from experiments.runs.evaluation import EVALUATIONS, Evaluation, read_evaluations
from experiments.runs.manifest import MANIFEST, RunManifest, read_manifest
from experiments.runs.provenance import diff_manifests
from experiments.runs.record import file_of, has_file, record_of
from experiments.study.schema import Run, Study
from experiments.support.json_files import REMAKE

RECIPE = "recipe."  # keys of verl; their files change, and are in no record


def read_run(study: Study, run: Run, results: Path, hint: str) -> RunManifest:
    """The manifest of a study's run in a results folder or a record."""
    run_dir = results / run.id
    path, manifest = file_of(run_dir, MANIFEST), read_manifest(run_dir, hint)
    if manifest.run != run.id:
        raise ValueError(f"{path}: run: it is of {manifest.run}; {hint}")
    try:
        found = settings_of(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("rl", *first["loc"])))
        raise ValueError(f"{path}: config.{key}: {first['msg']}; {hint}") from None
    wanted = study.training_config(run)
    for key, (its, asked) in diff_manifests(found, wanted).items():
        if key.startswith(RECIPE) and record_of(run_dir):
            continue
        raise ValueError(
            f"{path}: config.{key}: {its!r}, and in study {study.study} {asked!r}; run the study "
            "again, or name the study file that the run was trained with"
        )
    its_base, base = manifest.seeds.get("base"), study.bases[study.base_of(run)].seed
    if its_base not in (None, base):  # older runs lack it
        raise ValueError(
            f"{path}: seeds.base: {its_base}, and in study {study.study} {base} (own_base); run "
            "the study again, or name the study file that the run was trained with"
        )
    return manifest


def read_evaluations_of(study: Study, run_dir: Path, hint: str) -> list[Evaluation]:
    """The evaluations of a study's run; those of a record may be too old to name their settings."""
    evaluations, wanted = read_evaluations(run_dir, hint), study.evaluation.model_dump()
    for it in evaluations:
        if it.settings is None and record_of(run_dir):
            continue
        found = it.settings.model_dump() if it.settings else {}
        for key, (its, asked) in diff_manifests(found, wanted).items():
            raise ValueError(
                f"{file_of(run_dir, EVALUATIONS)}: settings.{key}: {its}, and in study "
                f"{study.study} {asked}; evaluate again: python -m experiments.evaluate.run "
                f"--study FILE --run {run_dir.name}"
            )
    return evaluations


def settings_of(manifest: RunManifest) -> dict[str, Any]:
    """A run's settings; keys of `rl` that are younger than the run have their defaults."""
    config = manifest.config
    return config | {"rl": GrpoConfig.model_validate(config["rl"]).model_dump(mode="json")}


def is_trained(study: Study, run: Run, results: Path) -> bool:
    """Whether a run of a study has finished, in a results folder or a record."""
    return (
        has_file(results / run.id, MANIFEST)
        and read_run(study, run, results, REMAKE).status == "finished"
    )


def complete_cells(study: Study, results: Path) -> dict[str | None, tuple[Run, ...]]:
    """The cells that have all their runs, in the study's order; without cells one named None."""
    runs_of: dict[str | None, list[Run]] = {}
    for run in study.runs:
        runs_of.setdefault(run.cell, []).append(run)
    return {
        cell: tuple(runs)
        for cell, runs in runs_of.items()
        if all(is_trained(study, run, results) for run in runs)
    }
