"""Largest memory over the steps of a verl run."""

from experiments.benchmarks.verl_steps import _memory


def test_peaks_are_over_all_steps_and_absent_where_verl_logged_none() -> None:
    actor, host = "perf/max_memory_allocated_gb", "perf/host_memory_used_gib"
    rows = [{actor: 3.0, host: None}, {actor: 5.0, host: None}, {actor: None, host: None}]
    assert _memory(rows) == {"actor_peak_gib": 5.0}
    assert _memory([{actor: 1.0, host: 7.0}]) == {"actor_peak_gib": 1.0, "host_peak_gib": 7.0}
