"""Recorded verl runs: real ones are judged as what they were, planted signs are found."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.runs.attempts import list_run_dirs
from qat_core.doctor.signs import judge
from qat_core.doctor.verl_run import K1, K3, read_run
from tests.records import recorded_metrics

RECORDS = Path(__file__).parents[3] / "experiments" / "records" / "verl-gpu"
NUM_STEPS = 20
CHI2 = "rollout_corr/chi2_token"


def write_log(path: Path, rows: list[dict[str, float]]) -> None:
    """As verl's file logger does, which writes null for what is not finite."""
    finite = [{k: v if np.isfinite(v) else None for k, v in row.items()} for row in rows]
    lines = [json.dumps({"step": n, "data": row}) for n, row in enumerate(finite, start=1)]
    path.write_text("\n".join(lines) + "\n")


def healthy_rows() -> list[dict[str, float]]:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(NUM_STEPS):
        k3 = float(3e-5 * np.exp(0.3 * rng.standard_normal()))
        k1 = k3 + float(1e-5 * rng.standard_normal())
        rows.append({K3: k3, K1: k1, CHI2: 2.5 * k3})
    return rows


def write_config(
    folder: Path, rollout: dict[str, Any], actor: dict[str, Any] | None = None
) -> None:
    (folder / ".hydra").mkdir()
    config = {"actor_rollout_ref": {"rollout": rollout, "actor": actor or {}}}
    (folder / ".hydra" / "config.yaml").write_text(json.dumps(config))


def write_dump(folder: Path, outputs: list[str]) -> None:
    (folder / "rollouts").mkdir()
    lines = [json.dumps({"input": "a", "output": text, "step": 20}) for text in outputs]
    (folder / "rollouts" / "20.jsonl").write_text("\n".join(lines))


def changed(change: Callable[[dict[str, float], int], None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        rows = healthy_rows()
        for step, row in enumerate(rows):
            change(row, step)
        write_log(folder / "run.jsonl", rows)

    return write


def healthy_with(*writers: Callable[[Path], None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_log(folder / "run.jsonl", healthy_rows())
        for writer in writers:
            writer(folder)

    return write


def scaled(factor: Callable[[int], float]) -> Callable[[Path], None]:
    """By a factor of the step, counted from 0."""
    return changed(lambda row, n: row.update({k: v * factor(n) for k, v in row.items()}))


STALENESS = "training/off_policy/trajectory_staleness/mean"


def of_verl(rollout: dict[str, Any], **qat: Any) -> Callable[[Path], None]:
    """A run's settings; verl writes the section `qat` always, off as it is."""
    section = {"fsdp_config": {"qat": {"enable": False, "mode": "w4a16"} | qat}}
    return healthy_with(lambda folder: write_config(folder, rollout, section))


PACKED = {"quantization": None, "engine_kwargs": {"vllm": {"quantization": "compressed-tensors"}}}
PROSE = "It was a bright cold day in April, and the clocks were striking thirteen. " * 3
PLANTED: dict[str, tuple[Callable[[Path], None], set[str]]] = {
    "healthy": (healthy_with(), set()),
    "one burst": (scaled(lambda n: 300 if n == 9 else 1), set()),
    "level": (scaled(lambda n: 100), {"level"}),
    "growth": (scaled(lambda n: 1.5**n), {"growth", "jump", "level"}),
    "jump": (scaled(lambda n: 200 if n > 11 else 1), {"jump", "growth"}),
    # a nucleus of 0.95: E[p/q] = 0.95
    "support": (changed(lambda row, _: row.update({K1: row[K3] + 0.05})), {"support"}),
    "not finite": (
        changed(lambda row, n: row.update({K3: float("inf")} if n > 9 else {})),
        {"level"},
    ),
    "top-p": (healthy_with(lambda f: write_config(f, {"top_p": 0.9, "top_k": -1})), {"sampling"}),
    "neutral": (healthy_with(lambda f: write_config(f, {"top_p": 1, "temperature": 0.6})), set()),
    "BF16": (of_verl({"quantization": None}), set()),
    "verl's QAT": (of_verl({}, enable=True), set()),
    "QAT": (of_verl(PACKED, enable=True, train=True), set()),
    "no QAT": (of_verl(PACKED, enable=True, train=False), {"quantization"}),
    "FP8": (of_verl({"quantization": "fp8"}), {"quantization"}),
    "stale": (changed(lambda row, _: row.update({STALENESS: 1.5})), {"staleness"}),
    "chi2 overflows": (
        changed(lambda row, n: row.update({CHI2: float("inf") if n == 9 else 2 * row[K3]})),
        {"tail"},
    ),
    "few tokens": (changed(lambda row, _: row.update({CHI2: 50 * row[K3]})), {"tail"}),
    "loops": (
        healthy_with(lambda f: write_dump(f, ["wait " * 200] * 4 + [PROSE] * 4)),
        {"repetition"},
    ),
    "prose": (healthy_with(lambda f: write_dump(f, [PROSE] * 8)), set()),
}
WARNINGS = {"staleness", "tail"}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_sign_is_named_and_no_other(name: str, tmp_path: Path) -> None:
    write, expected = PLANTED[name]
    write(tmp_path)
    judged = judge(read_run(tmp_path))
    named = {sign.name for sign in judged.signs if sign.verdict in ("fault", "warning")}
    # what grows 1.5-fold a step also ends above the band and may stay 10 times above the start
    assert named == expected or (name == "growth" and "growth" in named <= expected)
    assert judged.is_healthy == (expected <= WARNINGS)
    assert all(bool(sign.advice) == (sign.name in named) for sign in judged.signs)


def test_a_jump_is_named_by_its_step_where_others_have_no_value(tmp_path: Path) -> None:
    rows = healthy_rows()
    for step in (2, 4, 5):
        rows[step][K3] = float("nan")
    for row in rows[12:]:
        row.update({name: value * 200 for name, value in row.items()})
    write_log(tmp_path / "run.jsonl", rows)
    (jump,) = (sign for sign in judge(read_run(tmp_path)).signs if sign.name == "jump")
    first = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[12])["step"]
    assert jump.evidence.startswith(f"from step {first} on")


@pytest.mark.parametrize("record", [it.name for it in list_run_dirs(RECORDS)])
def test_recorded_runs_are_judged_as_what_they_were(record: str, tmp_path: Path) -> None:
    rows = recorded_metrics(RECORDS / record).to_dict("records")
    lines = [json.dumps({"step": int(row.pop("step")), "data": row}) for row in rows]
    (tmp_path / "run.jsonl").write_text("\n".join(lines))  # as verl's file logger wrote it
    as_logged, kind = read_run(tmp_path), "moe" if "moe" in record else "dense"
    recorded = read_run(RECORDS / record)
    assert recorded.series(K3).tolist() == as_logged.series(K3).tolist()
    judged = judge(recorded, kind)
    faults = {sign.name for sign in judged.signs if sign.verdict == "fault"}
    assert faults == ({"level"} if "noqat" in record else set())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x", r"metrics\.parquet: .*; restore the record"),
        ((RECORDS / "metrics.parquet").read_bytes(), r"parquet: mine: no such run; name one of"),
    ],
    ids=["damaged", "without it"],
)
def test_a_record_without_the_run_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path / "mine")


def two_settings(folder: Path) -> None:
    for run, top_p in (("a", 1.0), ("b", 0.9)):
        (folder / run).mkdir()
        write_config(folder / run, {"top_p": top_p})


def rollouts_and_validation(folder: Path) -> None:
    for kind in ("rollouts", "validation"):
        (folder / kind).mkdir()
        write_dump(folder / kind, [PROSE])


def two_logs(folder: Path) -> None:
    write_log(folder / "a.jsonl", healthy_rows())
    write_log(folder / "b.jsonl", healthy_rows())


NO_RUN: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda folder: None, "found none"),
    "no-folder": (lambda folder: folder.rmdir(), "no such folder; name that of a verl run"),
    "two-runs": (two_logs, r"needs one file .* found .*a\.jsonl, .*b\.jsonl"),
    "no-k3": (
        lambda f: write_log(f / "a.jsonl", [{"x": 1.0}]),
        "k3_kl: missing; set .*calculate_log",
    ),
    "no-data": (
        lambda f: (f / "a.jsonl").write_text('{"step": 1, "data": 3}\n'),
        "line 1: no step",
    ),
    "not-json": (lambda f: (f / "a.jsonl").write_text('{"step": 1, "data"\n'), "line 1: no step"),
    "no-output": (
        healthy_with(lambda f: (f / "1.jsonl").write_text("{}")),
        r"1\.jsonl, line 1: no rollout",
    ),
    "no-yaml": (
        healthy_with(lambda f: (f / "config.yaml").write_text("a: [")),
        r"config\.yaml: while",
    ),
    "two settings": (
        healthy_with(two_settings),
        r"a/\.hydra/config\.yaml: differs from .*/b/\.hydra",
    ),
    "rollouts of two kinds": (
        healthy_with(rollouts_and_validation),
        r"validation/.*: step 20 is in .*/rollouts/",
    ),
}


@pytest.mark.parametrize(("write", "message"), NO_RUN.values(), ids=NO_RUN)
def test_a_folder_without_a_run_is_refused(
    write: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    write(tmp_path)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path)


def test_a_validation_logged_later_completes_its_step(tmp_path: Path) -> None:
    rows = [{"step": 1, "data": {K3: 1e-5}}, {"step": 1, "data": {"val/acc": 0.5}}]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = read_run(tmp_path)
    assert list(run.steps) == [1] and run.metrics["val/acc"].tolist() == [0.5]


def test_a_resumed_run_has_its_settings_twice(tmp_path: Path) -> None:
    write_log(tmp_path / "run.jsonl", healthy_rows())
    for attempt in ("first", "second"):
        (tmp_path / attempt).mkdir()
        write_config(tmp_path / attempt, {"top_p": 0.9})
    assert read_run(tmp_path).setting("actor_rollout_ref", "rollout", "top_p") == 0.9
