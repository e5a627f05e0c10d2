"""The drift of a run on disk, while it trains and once it is recorded."""

from pathlib import Path

import pandas as pd
import pytest

from experiments.rl.metric_names import DRIFT_FILE
from experiments.runs.drift import KL, read_drift
from experiments.runs.record import DRIFT, has_file
from tests.manifests import MANIFEST, make_manifest
from tests.records import pack

LINES = (
    '{"step": 1, "layer": 0, "kind": "mlp.up_proj", "flipped_codes": null, "relative_error": 0.1}',
    '{"step": 2, "layer": 0, "kind": "mlp.up_proj", "flipped_codes": 0.123456789012345678}',
    '{"step": 2, "layer": 0, "kind": "kl", "kl": 2e-05, "kl_together": 1e-04}',
)


def test_a_record_reads_as_the_run_that_it_was_made_from(tmp_path: Path) -> None:
    run, record = tmp_path / "results" / MANIFEST["run"], tmp_path / "record"
    run.mkdir(parents=True)
    make_manifest().write(run)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert not has_file(run, DRIFT_FILE)
    (run / DRIFT_FILE).write_text("".join(line + "\n" for line in LINES))
    pack(run.parent, record)
    rows, first = read_drift(run), (record / DRIFT).read_bytes()
    assert has_file(run, DRIFT_FILE) and has_file(record / run.name, DRIFT_FILE)
    pd.testing.assert_frame_equal(read_drift(record / run.name), rows, check_like=True)
    assert rows[KL].dropna().tolist() == [2e-5]
    pack(record, record)
    assert (record / DRIFT).read_bytes() == first, "no time stamp"
    (record / DRIFT).write_bytes(first[:-9])
    with pytest.raises(ValueError, match=r"drift\.parquet: .*; restore it, or record the study"):
        read_drift(record / run.name)


def test_of_a_repeated_step_the_last_row_counts_and_a_cut_line_does_not(tmp_path: Path) -> None:
    again = LINES[1].replace("0.123456789012345678", "0.5")
    (tmp_path / DRIFT_FILE).write_text(
        "".join(line + "\n" for line in (*LINES, again)) + LINES[0][:20]
    )
    rows = read_drift(tmp_path)
    assert rows[rows["step"] == 2]["flipped_codes"].dropna().tolist() == [0.5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"drift\.jsonl: missing; train the run with rl\.drift_every: 1"),
        ("", r"drift\.jsonl: empty"),
        ('{"step": 1\n', r"drift\.jsonl: line 1: not JSON"),
        ('{"layer": 1}\n', r"drift\.jsonl: line 1: not a row of drift"),
        ("[1]\n", r"drift\.jsonl: line 1: not a mapping"),
        (
            '{"step": 1, "layer": -Infinity, "kind": "q_proj"}\n',
            r"drift\.jsonl: line 1: not a row of drift",
        ),
    ],
    ids=["missing", "empty", "not-json", "no-step", "no-row", "no-layer"],
)
def test_a_damaged_file_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / DRIFT_FILE).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_drift(tmp_path)
