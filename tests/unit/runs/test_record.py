from pathlib import Path
from typing import Any

import pytest

from experiments.runs.record import require_commit
from tests.manifests import make_manifest

COMMITTED = {"commit": "abc", "dirty": False, "diff_sha256": "d"}


def test_runs_of_committed_code_are_recorded() -> None:
    require_commit(make_manifest(git=COMMITTED), Path("run"))


@pytest.mark.parametrize(
    ("git", "message"),
    [
        (COMMITTED | {"dirty": True}, "trained by changes that no commit holds"),
        (COMMITTED | {"commit": None}, "trained by code that no commit holds"),
        (None, "trained by code that no commit holds"),
    ],
    ids=["dirty", "no-commit", "no-checkout"],
)
def test_runs_of_uncommitted_code_are_refused(git: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(ValueError, match=rf"run/manifest.json: git: {message}; commit and"):
        require_commit(make_manifest(git=git), Path("run"))
