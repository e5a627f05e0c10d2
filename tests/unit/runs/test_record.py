from pathlib import Path
from typing import Any

import pytest

from experiments.runs.manifest import RunManifest
from experiments.runs.record import portable, require_commit, require_one_base_a_seed
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


def run_from(base: str, arm: str, seed: int) -> RunManifest:
    run = f"nano_{arm}.cell_seed{seed}"
    named = {"run": run, "arm": arm, "cell": "cell", "seed": seed, "seeds": {"run": seed}}
    return make_manifest(**named, digests={"base": base})


def test_a_cell_has_one_base_a_seed() -> None:
    bf16, qat = "bf16", "nvfp4-qat"
    whole = [run_from("x", bf16, 0), run_from("x", qat, 0), run_from("y", bf16, 1)]
    require_one_base_a_seed("cell", [*whole, run_from("y", qat, 1)])
    names = "cell cell: nano_bf16.cell_seed1 and nano_nvfp4-qat.cell_seed1 start from different"
    with pytest.raises(ValueError, match=names):
        require_one_base_a_seed("cell", [*whole, run_from("z", qat, 1)])


def test_a_recorded_command_names_no_folder_of_a_machine() -> None:
    command = "/a/python3 -m experiments.launch.run --study s/x.yaml --log '/b c/train.log'"
    shown = "python3 -m experiments.launch.run --study s/x.yaml --log train.log"
    assert portable(command) == shown and portable(shown) == shown
