"""What a dry run says of a study: runs, GPUs and hours, in columns."""

from experiments.runs.expected_time import expected_time
from experiments.study.load import load_study
from experiments.study.preview import preview
from experiments.study.schema import STUDIES


def test_columns_are_aligned_whatever_the_number_of_seeds() -> None:
    study = load_study(STUDIES / "collapse_safety_again.yaml")
    head, *rows, cell = preview(study.model_copy(update={"seeds": (*range(70), 90)})).splitlines()
    assert head.endswith(": 142 runs, trainer local, 1 GPU each") and cell.startswith("cell")
    columns = [row.index(it) for row, it in zip(rows, ("seeds", "0 to", "0 to"), strict=True)]
    assert len(set(columns)) == 1
    assert "  71    0 to 69, 90  12.03 MiB" in rows[1]


def test_the_time_is_that_of_the_record_for_as_many_runs() -> None:
    study = load_study(STUDIES / "collapse_safety_again.yaml")
    hours = float(expected_time(study).split()[2])
    half = float(expected_time(study.model_copy(update={"seeds": study.seeds[:36]})).split()[2])
    assert hours > 1 and abs(half - hours / 2) <= 0.1
    assert "(NVIDIA H200)" in expected_time(study)
    assert "no record" in expected_time(study.model_copy(update={"study": "new"}))
