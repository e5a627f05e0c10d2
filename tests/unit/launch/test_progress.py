"""The line of progress counts what runs leave on disk."""

from pathlib import Path

from experiments.launch.progress import Progress
from experiments.study.load import load_study
from tests.workflow.programs import SMOKE

STUDY = load_study(SMOKE)


def test_runs_count_as_in_work_from_their_first_step_and_as_done_once_evaluated(
    tmp_path: Path,
) -> None:
    progress = Progress(STUDY, tmp_path)
    assert progress.line().startswith("0 of 2 runs done, 0 in work")
    run_dir = tmp_path / STUDY.runs[0].id
    attempt = run_dir / "attempts" / "1"
    attempt.mkdir(parents=True)
    (attempt / "metrics.jsonl").write_text("{}\n")
    assert progress.line().startswith("0 of 2 runs done, 1 in work")
    assert progress.line().endswith(" left")
    (run_dir / "manifest.json").touch()
    assert progress.line().startswith("0 of 2 runs done, 1 in work")
    (run_dir / "eval.json").touch()
    assert progress.line().startswith("1 of 2 runs done, 0 in work")
    assert "2 runs, 1 to go" in Progress(STUDY, tmp_path).beforehand()
