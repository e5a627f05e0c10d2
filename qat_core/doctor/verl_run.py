"""A recorded verl run: its metrics, its configuration and its dumped rollouts, as found on disk.

verl 0.9 writes `{"step": n, "data": {...}}` lines (file logger), Hydra's `config.yaml`, and with
`trainer.rollout_data_dir` a file `<step>.jsonl` a step, whose lines hold `input` and `output` as
text. It dumps no log-probs: what a run says of the mismatch are sums over tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from qat_core.yaml_damage import YAML_DAMAGE

Verdict = Literal["fault", "warning", "none", "not recorded"]
RECORDED = "metrics.parquet"  # of all runs of a committed record
ACTOR_AND_ROLLOUT = "actor_rollout_ref"
DUMP = re.compile(r"\d+\.jsonl")
# of a line that is no JSON, or another JSON than verl writes
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
K3, K1 = "rollout_corr/k3_kl", "rollout_corr/kl"
# of k3, usual of BF16 on both sides, by kind of model
BANDS = {"dense": (1e-5, 3e-4), "moe": (1e-4, 1e-3)}


@dataclass(frozen=True)
class VerlRun:
    """What a folder holds of one run.

    Metrics have a value a step by verl's name, NaN where a step lacks it; `responses` are the
    dumped ones, by step.
    """

    steps: Sequence[int]
    metrics: Mapping[str, np.ndarray]
    config: Mapping[str, Any] = field(default_factory=dict)
    responses: Mapping[int, Sequence[str]] = field(default_factory=dict)

    def series(self, name: str) -> np.ndarray:
        """The finite values of a metric, in order of steps."""
        values = self.metrics.get(name, np.array([]))
        found: np.ndarray = values[np.isfinite(values)]
        return found

    def setting(self, *keys: str) -> Any:
        """A value of the configuration, None if it is not there."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


@dataclass(frozen=True)
class Sign:
    """One thing that a recorded run shows; verdicts as in `signs.py`."""

    name: str
    title: str
    evidence: str
    verdict: Verdict
    advice: str = ""


@dataclass(frozen=True)
class Judgement:
    """All signs of a run."""

    num_steps: int
    band: tuple[float, float]
    signs: tuple[Sign, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether no sign is a fault; warnings pass."""
        return not any(sign.verdict == "fault" for sign in self.signs)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self) | {"healthy": self.is_healthy}


def read_run(folder: Path) -> VerlRun:
    """Reads a folder, or a file of the file logger, or a run of a committed record: RECORD/RUN.

    Raises:
        ValueError: no metrics with `rollout_corr/k3_kl`, or damaged ones; metrics, settings or
            rollouts of several runs.
    """
    if not folder.exists():
        if (folder.parent / RECORDED).is_file():
            return VerlRun(*_read_log(folder, _recorded(folder)))
        raise ValueError(f"{folder}: no such folder; name that of a verl run")
    files = [folder] if folder.is_file() else list(folder.rglob("*.jsonl"))
    logs = sorted(p for p in files if not DUMP.fullmatch(p.name) and _is_log(p))
    if len(logs) != 1:
        found = f"found {', '.join(map(str, logs[:3]))}: name one" if logs else "found none"
        raise ValueError(
            f"{folder}: needs one file of verl's file logger (trainer.logger: [file]), {found}"
        )
    steps, metrics = _read_log(logs[0], logs[0].read_bytes().splitlines())
    return VerlRun(steps, metrics, _config(folder), _dumped(files))


def _is_log(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline()
    return first.lstrip().startswith(b"{") and b'"step"' in first and b'"output"' not in first


def _read_log(path: Path, lines: Sequence[str | bytes]) -> tuple[list[int], dict[str, np.ndarray]]:
    """Rows of verl's file logger, or flat ones; of a repeated step the last counts.

    What is not finite verl writes as null.
    """
    rows: dict[int, dict[str, float]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            step, data = int(row["step"]), row.get("data", row)
            numbers = ((k, v) for k, v in data.items() if isinstance(v, int | float | None))
            known = {k: np.nan if v is None else float(v) for k, v in numbers}
        except DAMAGE:
            raise ValueError(
                f"{path}, line {number}: no step of verl's file logger; remove the damaged line"
            ) from None
        # after the last step verl logs a validation under its number again
        rows[step] = rows.get(step, {}) | known
    steps = sorted(step for step, row in rows.items() if K3 in row)
    if not steps:
        raise ValueError(
            f"{path}: {K3}: missing; set actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    names = sorted({name for step in steps for name in rows[step]})
    return steps, {n: np.array([rows[s].get(n, np.nan) for s in steps]) for n in names}


def _recorded(run: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = run.parent / RECORDED
    try:
        rows = pq.read_table(path, filters=[("run", "==", run.name)]).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}; restore the record") from None
    if not rows:
        raise ValueError(f"{path}: {run.name}: no such run; name one of {run.parent}")
    # NaN is undefined, and null of columns that other runs have
    known = ({k: v for k, v in row.items() if k != "run" and v is not None} for row in rows)
    return list(map(json.dumps, known))


def _config(folder: Path) -> dict[str, Any]:
    """Hydra's; a run that was resumed has several, which say the same."""
    if folder.is_file():
        return {}
    found: dict[Path, dict[str, Any]] = {}
    for path in sorted(folder.rglob("config.yaml")):
        try:
            config = yaml.safe_load(path.read_bytes())
        except YAML_DAMAGE as error:
            raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
        if isinstance(config, dict) and ACTOR_AND_ROLLOUT in config:
            found[path] = config
    for path, other in pairwise(found):
        if found[path][ACTOR_AND_ROLLOUT] != found[other][ACTOR_AND_ROLLOUT]:
            raise ValueError(f"{path}: differs from {other}; name a folder with one of them")
    return next(iter(found.values()), {})


def _dumped(files: Sequence[Path]) -> dict[int, list[str]]:
    dumps: dict[int, Path] = {}
    for path in sorted(it for it in files if DUMP.fullmatch(it.name)):
        step = int(path.stem)
        if step in dumps:
            raise ValueError(
                f"{path}: step {step} is in {dumps[step]} too; name a folder with the rollouts of "
                "one run, without dumps of its validation"
            )
        dumps[step] = path
    return {step: _responses(dumps[step]) for step in sorted(dumps)}


def _responses(path: Path) -> list[str]:
    responses = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            responses.append(str(json.loads(line)["output"]))
        except DAMAGE:
            raise ValueError(
                f"{path}, line {number}: no rollout of verl's with an `output`; remove the line"
            ) from None
    return responses
