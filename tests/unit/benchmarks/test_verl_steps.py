"""Largest memory over the steps of a verl run."""

from experiments.benchmarks.verl_steps import _memory


def test_peaks_are_over_all_steps_and_absent_where_verl_logged_none() -> None:
    gpu, host = "perf/max_memory_allocated_gb", "actor/perf/cpu_memory_used_gb"
    rows = [{gpu: 3.0, host: None}, {gpu: 5.0, host: None}, {gpu: None, host: None}]
    assert _memory(rows) == {"gpu_peak_gib": 5.0}
    assert _memory([{gpu: 1.0, host: 7.0}]) == {"gpu_peak_gib": 1.0, "host_gib": 7.0}
