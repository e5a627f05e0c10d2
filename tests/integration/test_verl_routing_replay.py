"""verl's FSDP2 engine under `+routing_replay=r3`: it uses the routes of its batches, or ends."""

import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from experiments.study.schema import ROOT
from tests.nano_models import write_nano

pytestmark = pytest.mark.long
ENGINES = {"r3": "NvFp4Engine", "r3 packed": "NvFp4Engine", "r3 bf16": "ReplayEngine"}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of all engines of `verl_replay.py`, in one process: importing verl takes seconds."""
    folder = tmp_path_factory.mktemp("replay")
    write_nano("nano-moe", folder / "moe", num_layers=2)
    write_nano("nano-dense", folder / "dense", num_layers=1)
    program = [sys.executable, "-m", "tests.integration.verl_replay"]
    command = [*program, str(folder / "moe"), str(folder / "dense"), str(folder / "facts.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    content: dict[str, dict[str, Any]] = json.loads((folder / "facts.json").read_text())
    return content


@pytest.mark.verl_table(
    "`+routing_replay=r3`",
    "the actor uses the routes it is fed: [routing_replay.md](routing_replay.md)",
)
@pytest.mark.parametrize(("case", "engine"), ENGINES.items(), ids=ENGINES)
def test_the_actor_uses_the_routes_of_its_batch(
    facts: dict[str, Any], case: str, engine: str
) -> None:
    """Padded and packed, NVFP4 and BF16."""
    found = facts[case]
    assert found["engine"] == engine
    assert found["own routes, same log-probs"] and found["own routes, same gradients"]
    assert found["others, other log-probs"] and found["others, the router learns"]
    assert found["others, checkpointed"], "blocks that are computed again get the same routes"
    used = found["used"]
    last = (6, 14)  # of sequences of 7 and 8 tokens: routed by the model itself
    assert [ids for token, ids in enumerate(used) if token not in last] == found["given"]


NO_ROUTE = "conversations of several turns have none for what the model did not sample"
REFUSALS = {
    "missing": "routed_experts: missing: the rollouts returned no routes",
    "hole": f"routed_experts: sequence 1 has no route for token 3 of 8; {NO_ROUTE}",
    "whole sequence": f"routed_experts: sequence 0 has no route for token 0 of 7; {NO_ROUTE}",
    "trains nothing": "accepted",
    "lengths": "routed_experts: of other lengths than input_ids",
    "layers": "routed_experts: of 1 layers, the model has experts in layer 1",
    "top-1": "routed_experts: with one expert a token, verl's zeros for 'no route' also mean",
    "top-3": "routing replay: model.layers.0.mlp: routes are not different experts out of 8",
    "expert 8": "routing replay: model.layers.0.mlp: routes are not different experts out of 8",
}


@pytest.mark.parametrize("case", ENGINES)
def test_routes_that_are_missing_or_unfit_end_the_step(facts: dict[str, Any], case: str) -> None:
    found = facts[case]["refused"]
    assert found.keys() == REFUSALS.keys()
    for name, message in REFUSALS.items():
        assert found[name].startswith(message), name


def test_a_dense_model_is_refused(facts: dict[str, Any]) -> None:
    assert facts["dense"] == (
        "actor_rollout_ref.actor.fsdp_config.router_replay.mode: R3: the model has no experts; "
        "remove the key"
    )


@pytest.mark.parametrize(("case", "mode"), [("mode", "R2"), ("ulysses", "R3")])
def test_the_engine_refuses_another_mode_and_sequence_parallelism(
    facts: dict[str, Any], case: str, mode: str
) -> None:
    assert facts[case] == (
        f"actor_rollout_ref.actor.fsdp_config.router_replay.mode: {mode}: FSDP2 replays R3 alone, "
        "without sequence parallelism"
    )
