"""Routing replay's p-values, computed again from the committed records by another way."""

import json
from math import sqrt
from statistics import mean, stdev

import numpy as np
from scipy.stats import t

from analysis.tables import benchmark_text
from experiments.study.schema import ROOT

FOLDER = ROOT / "experiments" / "records" / "benchmarks"
ARMS = {"bf16": "BF16", "nvfp4-noqat": "NVFP4, no QAT", "nvfp4-qat": "NVFP4 QAT"}


def p_value(arm: str, number: str) -> float:
    """Of Student's t of the log ratios, with replay over without."""
    records = [json.loads(it.read_text()) for it in FOLDER.glob("routing_replay_cpu*.json")]
    runs = [run for it in records for run in it["runs"] if run["arm"] == arm]
    logs = [np.log(run["on"][number] / run["off"][number]) for run in runs]
    return float(2 * t.sf(abs(mean(logs)) / (stdev(logs) / sqrt(len(logs))), len(logs) - 1))


def test_p_values_are_corrected_for_all_arms_and_numbers_together() -> None:
    values = {(arm, number): p_value(arm, number) for arm in ARMS for number in ("mean", "p99.9")}
    corrected, largest = {}, 0.0
    for left, key in zip(range(6, 0, -1), sorted(values, key=values.__getitem__), strict=True):
        corrected[key] = largest = max(largest, left * values[key])
    text = benchmark_text("routing_replay", FOLDER, "cpu")
    for arm, label in ARMS.items():
        assert f"| {label} | {corrected[arm, 'mean']:.3f} | {corrected[arm, 'p99.9']:.3f} |" in text
