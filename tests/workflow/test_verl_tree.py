"""verl from a source tree that VERL_TREE names, such as a checkout of its main branch.

Beside the installed vLLM; what is installed of verl stands behind it. What is found is noted in
docs/verl.md, "Versions".
"""

import os
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from experiments.study.schema import ROOT
from tests.unit.test_used_names import LOOK_UP, OF_VERL, printed_with_verl
from tests.workflow.verl_runs import CASES, prepare, run

TREE = os.environ.get("VERL_TREE", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not TREE, reason="VERL_TREE names no source tree of verl"),
]


@pytest.fixture(autouse=True)
def first_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([TREE, str(ROOT)]))


def test_the_tree_has_all_names_that_are_used() -> None:
    first, *found = printed_with_verl(f"import verl; print(verl.__file__)\n{LOOK_UP}")
    assert Path(first).is_relative_to(TREE)
    assert {used.name for used in OF_VERL} <= set(found)


@pytest.mark.parametrize("name", ["tensor-parallel", "moe-tensor-parallel"])
def test_two_workers_train_and_every_sync_brings_the_bytes_sent(name: str, tmp_path: Path) -> None:
    prepare(tmp_path, [CASES[name]])
    found = run(CASES[name], tmp_path, tmp_path / "out")
    assert found["steps"] == CASES[name].steps and found["syncs"] > CASES[name].steps
