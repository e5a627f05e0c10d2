"""Manifests: what a machine, a checkout and a study are recorded as, and how two runs differ."""

import os
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from experiments.runs import provenance
from experiments.runs.settings import read_run
from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES, Study
from experiments.support.json_files import write_json
from tests.records import make_manifest, pack
from tests.workflow.programs import module


def test_switches_are_recorded_but_for_secrets_and_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in filter(lambda it: it.startswith(provenance.SWITCHES), list(os.environ)):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setenv("QAT_CORE_LINEAR_KERNEL", "humming")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("EDITOR", "vi")
    expected = {"QAT_CORE_LINEAR_KERNEL": "humming", "VLLM_CACHE_ROOT": "cache"}
    assert provenance.switches() == expected


def test_git_state_tells_a_clean_checkout_from_a_changed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.git_state() is None

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "a")
    clean = provenance.git_state()
    assert clean is not None and not clean.dirty and len(clean.commit or "") == 40
    (tmp_path / "a").write_text("2")
    changed = provenance.git_state()
    assert changed is not None and changed.dirty
    assert changed.diff_sha256 != clean.diff_sha256
    git("config", "core.abbrev", "20")  # as a clone with a longer history shortens hashes
    assert provenance.git_state() == changed
    for output in ("a", "new"):  # what is being written does not count, be it known to git or not
        git("checkout", "-q", "a")
        (tmp_path / output).write_text("3")
        assert provenance.git_state(tmp_path / output) == clean
    assert provenance.git_state(tmp_path.parent / "elsewhere") == provenance.git_state()


def test_diff_names_the_keys_that_differ() -> None:
    a = {"seed": 0, "git": {"commit": "1", "dirty": False}, "old": 1}
    b = {"seed": 0, "git": {"commit": "2", "dirty": False}, "new": 1}
    assert provenance.diff_manifests(a, b) == {
        "git.commit": ("1", "2"),
        "old": (1, None),
        "new": (None, 1),
    }


run_diff = partial(module, "experiments.runs.provenance diff")


def test_diff_program(tmp_path: Path) -> None:
    for name, lr in (("a", 1e-6), ("b", 3e-4)):
        (tmp_path / name).mkdir()
        manifest = {"run": name, "config": {"rl": {"lr": lr}}}
        write_json(tmp_path / name / "manifest.json", manifest)
    shown = run_diff(tmp_path / "a", tmp_path / "b" / "manifest.json")
    assert shown.returncode == 0
    assert "config.rl.lr" in shown.stdout and "0.0003" in shown.stdout
    (tmp_path / "b" / "manifest.json").unlink()
    line = f"error: {tmp_path}/b/manifest.json: missing; name a run's folder or its manifest.json\n"
    assert run_diff(tmp_path / "a", tmp_path / "b").stderr == line


LOCAL, OF_VERL = (load_study(STUDIES / f"{name}.yaml") for name in ("default", "verl_nano"))


def write_run(
    study: Study, results: Path, seeds: dict[str, int] | None = None, **changes: Any
) -> None:
    """The first run of a study, with changed settings; None takes a key away."""
    run = study.runs[0]
    config = study.training_config(run) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    named = {"run": run.id, **run._asdict(), "seeds": seeds or {"run": run.seed}}
    (results / run.id).mkdir()
    make_manifest(**named, config=kept).write(results / run.id)


def read(study: Study, results: Path) -> None:
    read_run(study, study.runs[0], results, "train it")


def test_keys_that_are_younger_than_a_run_have_their_defaults(tmp_path: Path) -> None:
    rl = LOCAL.training_config(LOCAL.runs[0])["rl"]
    older = {key: value for key, value in rl.items() if key not in ("advantage", "routing_replay")}
    write_run(LOCAL, tmp_path, rl=older)
    read(LOCAL, tmp_path)
    other = LOCAL.model_copy(update={"rl": LOCAL.rl.model_copy(update={"advantage": "reward"})})
    with pytest.raises(
        ValueError, match=r"config.rl.advantage: 'group', and in study default 'rew"
    ):
        read(other, tmp_path)


def test_a_run_from_another_base_is_refused(tmp_path: Path) -> None:
    study = LOCAL.model_copy(update={"seeds": (1,)})
    write_run(study, tmp_path, {"run": 1, "base": 0})
    read(study.model_copy(update={"own_base": False}), tmp_path)
    with pytest.raises(ValueError, match=r"seeds.base: 0, and in study default 1 \(own_base\)"):
        read(study, tmp_path)


def test_of_a_record_verls_recipe_may_have_changed(tmp_path: Path) -> None:
    write_run(OF_VERL, tmp_path, recipe={"trainer.nnodes": 2})
    with pytest.raises(
        ValueError, match=r"config.recipe.trainer.nnodes: 2, and in study verl-nano"
    ):
        read(OF_VERL, tmp_path)
    (tmp_path / OF_VERL.runs[0].id / "metrics.jsonl").write_text('{"step": 1}\n')
    pack(tmp_path, tmp_path / "record")
    read(OF_VERL, tmp_path / "record")


def test_settings_that_are_none_are_named(tmp_path: Path) -> None:
    write_run(LOCAL, tmp_path, rl={"steps": 20, "lr": "fast"})
    with pytest.raises(ValueError, match=r"manifest.json: config.rl.lr: .* number.*; train it$"):
        read(LOCAL, tmp_path)


RECORDS = ROOT / "experiments" / "records"
NAMED = re.compile(r'"(?:git\.)?commit": "([0-9a-f]{40})"')
# landed on a newer state as other commits: the table in REPRODUCING.md
REWRITTEN = {"29d6248", "f5bf5d4"}

git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False)


def test_commits_of_records_are_in_the_history() -> None:
    if git(["git", "rev-parse", "--is-shallow-repository"]).stdout.strip() != "false":
        pytest.skip("needs a clone with its history")
    files = [path for kind in ("json", "jsonl", "md") for path in RECORDS.rglob(f"*.{kind}")]
    named = {commit for file in files for commit in NAMED.findall(file.read_text())}
    assert len(named) > 10
    is_ancestor = ["git", "merge-base", "--is-ancestor"]
    missing = {commit[:7] for commit in named if git([*is_ancestor, commit, "HEAD"]).returncode}
    assert missing == REWRITTEN
