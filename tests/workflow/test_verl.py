"""verl itself on a CPU: Ray, FSDP2 with QAT, packed weights to vLLM, by the harness and by users'
commands.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from mlflow import MlflowClient

from experiments.study.schema import ROOT
from experiments.tracking.store import SQLITE
from tests.files import read_rows
from tests.study_files import REMOVED, study_content, write_study
from tests.workflow import verl_runs
from tests.workflow.programs import listening_addresses, module
from tests.workflow.verl_cases import Case
from tests.workflow.verl_runs import CASES, RECORD, prepare, run, table

# k3 KL of a step, from a base of 100 steps. With QAT, 5 runs of three steps: 1.3e-5 to 2.8e-4, but
# once 1.1e-3, in an MoE, where one rerouted token can carry a step, so the median counts. Without
# QAT: 3.6e-3 to 6.0e-3; from a base of 50 steps, on the eager engine, 4.4e-3 to 4.9e-3.
LARGEST_MEDIAN_K3_KL = 1e-3
# IPv4, and IPv4 through an IPv6 socket
LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1"}


def train(
    folder: Path, model: str, arm: str, num_workers: int, *, base_steps: int, steps: int
) -> Path:
    """Trains a run from a base of little training; returns the run's folder."""
    content = study_content("verl_nano")
    changes = {"models": {model: content["models"][model]}, "arms": [arm], "gpus": num_workers}
    changes |= {f"models/{model}/pretrain/steps": base_steps, "kl_gate": REMOVED}
    changes |= {"rl/steps": steps, "rl/save_every": steps}
    file = write_study(folder, changes, "verl_nano")
    run_dir = folder / "results" / f"{model}_{arm}_seed0"
    base = folder / "results" / "base" / model
    data = folder / "results" / "data" / content["study"]
    for program, *arguments in (
        ("experiments.base make", "--model", model, "--out", base),
        ("experiments.verl.data", "--out", data),
        ("experiments.launch.run", "--run", run_dir.name, "--log", folder / "train.log"),
    ):
        with listening_addresses() as addresses:
            done = module(program, "--study", file, *arguments, folder=folder)
        assert done.returncode == 0, done.stderr
    (folder / "listening.json").write_text(json.dumps(sorted(addresses)))
    return run_dir


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of three steps with QAT."""
    folder = tmp_path_factory.mktemp("moe")
    return train(folder, "nano-moe-verl", "nvfp4-qat", num_workers=2, base_steps=50, steps=3)


@pytest.fixture
def manifest(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "manifest.json").read_text())


@pytest.mark.verl_table(
    "fixed batch sizes and remove-padding, an MoE on two workers",
    "trains; trainer and rollouts agree",
)
def test_trainer_and_rollouts_agree(run_dir: Path) -> None:
    rows = read_rows(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert median(row["rollout_corr/k3_kl"] for row in rows) < LARGEST_MEDIAN_K3_KL
    assert min(row["actor/grad_norm"] for row in rows) > 0


def test_services_listen_on_loopback_alone(run_dir: Path) -> None:
    addresses = json.loads((run_dir.parents[1] / "listening.json").read_text())
    assert addresses and set(addresses) <= LOOPBACK


def test_coverage_has_all_weights(manifest: dict[str, Any]) -> None:
    rows = manifest["coverage"]
    assert all(row["trained"] == row["packed"] == row["served"] for row in rows)
    assert {row["name"].rpartition(".")[2] for row in rows if row["packed"]} >= {"weight"}
    experts = [row for row in rows if "experts" in row["name"]]
    assert experts and all(row["packed"] for row in experts)


def test_weight_memory_is_as_predicted(manifest: dict[str, Any]) -> None:
    memory = manifest["memory"]
    assert memory["measured_packed_gib"] == pytest.approx(memory["predicted_packed_gib"], rel=1e-9)


def test_mlflow_has_mismatch_memory_and_status(run_dir: Path, manifest: dict[str, Any]) -> None:
    client = MlflowClient(f"{SQLITE}{run_dir.parents[1]}/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "verl-nano"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert len(client.get_metric_history(run.info.run_id, "rollout_corr/k3_kl")) == 3
    packed_gib = run.data.metrics["memory/measured_packed_gib"]
    assert packed_gib == manifest["memory"]["measured_packed_gib"]


@pytest.mark.long
def test_bf16_arm_trains_with_verls_own_engine(tmp_path: Path) -> None:
    run_dir = train(tmp_path, "nano-dense-verl", "bf16", num_workers=1, base_steps=2, steps=1)
    (row,) = read_rows(run_dir / "metrics.jsonl")
    assert row["rollout_corr/k3_kl"] < LARGEST_MEDIAN_K3_KL
    memory = json.loads((run_dir / "manifest.json").read_text())["memory"]
    assert memory["measured_bf16_gib"] == pytest.approx(memory["predicted_bf16_gib"], rel=1e-9)
    assert memory["measured_packed_gib"] is None


PAGE = ROOT / "docs" / "verl.md"


def test_the_page_says_what_was_recorded() -> None:
    record = json.loads(RECORD.read_text())
    assert [name for name in CASES if name in record["cases"]] == list(record["cases"])
    assert not any(case["git"]["dirty"] for case in record["cases"].values())
    _, found, _ = PAGE.read_text().replace("<!-- end -->", "<!-- runs -->").split("<!-- runs -->")
    assert found.strip() == table(record["cases"])


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ("ab bc", None),
        ("ab ac", "not the weights that were saved are sent after loading"),
        ("ab bb", "weights did not change between syncs"),
        ("bb bc", "weights did not change between syncs"),
    ],
)
def test_a_resumed_run_starts_with_the_weights_last_sent_and_trains_on(
    sent: str, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = iter(sent.split())

    def train(_case: Case, _folder: Path, out: Path) -> dict[str, Any]:
        out.mkdir(parents=True)
        for sync, weights in enumerate(next(contents)):
            (out / f"sent-1-{sync}.json").write_text(json.dumps({"weight": weights}))
        return {"steps": 1, "syncs": 2, "metrics": {"actor/grad_norm": [1.0]}}

    monkeypatch.setattr(verl_runs, "_train", train)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        found = run(CASES["resumed"], tmp_path, tmp_path / "out")
        assert found == {"steps": 2, "syncs": 4, "metrics": {"actor/grad_norm": [1.0, 1.0]}}


@pytest.mark.parametrize(
    ("received", "message"),
    [
        ("a abc", None),
        ("a ab", "not the bytes that were sent"),
        ("a acb", "2: not in the order in which they were sent"),
        ("d abc", "not the bytes that were sent"),
    ],
)
def test_of_two_pools_each_sync_reaches_one(
    received: str, message: str | None, tmp_path: Path
) -> None:
    sides = {"sent-0": "aabc"} | {
        f"received-{i}": contents for i, contents in enumerate(received.split(), 1)
    }
    for side, contents in sides.items():
        for sync, weights in enumerate(contents):
            (tmp_path / f"{side}-{sync}.json").write_text(json.dumps({"w:codes": weights}))
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        found = verl_runs._syncs_of_pools(tmp_path)
        assert found == {"syncs": 4, "receivers": 2, "tensors": 1, "packed": 1}


@pytest.mark.long
def test_every_sync_of_a_trainer_apart_from_its_rollouts_brings_its_bytes(tmp_path: Path) -> None:
    case = CASES["one-step-off"]
    prepare(tmp_path / "base", [case])
    found = run(case, tmp_path / "base", tmp_path / "run")
    assert found["steps"] == 2 and found["syncs"] == 3 and found["packed"] == 14
