"""Manifests: what a machine and a checkout are recorded as, and how two runs differ."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.runs import provenance


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


def run_diff(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.runs.provenance", "diff", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_diff_program(tmp_path: Path) -> None:
    for name, lr in (("a", 1e-6), ("b", 3e-4)):
        (tmp_path / name).mkdir()
        manifest = {"run": name, "config": {"rl": {"lr": lr}}}
        (tmp_path / name / "manifest.json").write_text(json.dumps(manifest))
    shown = run_diff(tmp_path / "a", tmp_path / "b" / "manifest.json")
    assert shown.returncode == 0
    assert "config.rl.lr" in shown.stdout and "0.0003" in shown.stdout


@pytest.mark.parametrize(
    ("content", "line"),
    [(None, "missing; name a run's folder"), ("{", "not JSON")],
    ids=["missing", "garbled"],
)
def test_diff_program_refuses_in_one_line(tmp_path: Path, content: str | None, line: str) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    shown = run_diff(tmp_path, tmp_path)
    assert shown.returncode == 2
    assert shown.stderr.startswith(f"error: {tmp_path}/manifest.json: {line}")
    assert len(shown.stderr.splitlines()) == 1
