"""Seconds of the main job's stages, by what Snakemake notes of each file of a job."""

from pathlib import Path

import pytest

from experiments.benchmarks.main_job import stages
from experiments.support.json_files import write_json


def test_a_job_with_several_files_counts_once_and_until_its_last(tmp_path: Path) -> None:
    notes = [("train", 1.0, 4.5), ("train", 1.0, 5.0), ("train", 2.0, 4.0), ("data", 0.0, 9.0)]
    for number, (rule, start, end) in enumerate(notes):
        write_json(tmp_path / str(number), {"rule": rule, "starttime": start, "endtime": end})
    found = stages(tmp_path)
    assert found["train_s"] == pytest.approx(6)
    assert sum(found.values()) == pytest.approx(6)
