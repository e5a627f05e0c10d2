"""A study is judged by the protocol that its runs know."""

import json
from pathlib import Path

import pytest

from analysis import claims
from experiments.study.protocol import protocol_digest
from experiments.study.schema import Study


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "protocol.md"
    path.write_text("# Protocol\n\nPrimary: C12\n")
    return path


def test_another_protocol_than_that_of_the_runs_is_refused(
    study: Study, results_dir: Path, page: Path
) -> None:
    planned = study.model_copy(update={"protocol": page})
    for run in study.runs:
        path = results_dir / run.id / "manifest.json"
        known = {"protocol_sha256": protocol_digest(planned)}
        path.write_text(json.dumps(json.loads(path.read_text()) | known))
    assert claims.judge(planned, results_dir).claims
    page.write_text(page.read_text() + "\n## Changes\n\nLater: a typo.\n")
    assert claims.judge(planned, results_dir).claims
    page.write_text(page.read_text().replace("C12", "C14"))
    with pytest.raises(ValueError, match=r"manifest.json: protocol_sha256: not that of"):
        claims.judge(planned, results_dir)
