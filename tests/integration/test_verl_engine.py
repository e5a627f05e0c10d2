"""Engines that verl's registry makes of a command: class, stream, checkpoints, routing replay, what
they refuse.
"""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from qat_core.weights.transfer import PLAN_NAME
from tests.integration import verl_ranks
from tests.nano_models import write_nano
from tests.ranks import run_ranks
from tests.workflow.programs import module

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of all cases of `verl_engine.py`, in one process: importing verl takes seconds."""
    folder = tmp_path_factory.mktemp("engine")
    write_nano("nano-moe", folder / "model", num_layers=1)
    arguments = (folder / "model", folder / "outcomes.json")
    done = module("tests.integration.verl_engine", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "outcomes.json").read_text())


@pytest.mark.verl_table(
    "`actor.strategy=fsdp2`, an MoE with fused experts",
    "the actor is this project's engine, whose stream is packed",
)
@pytest.mark.parametrize("case", ["qat", "amax", "no-qat"])
def test_nvfp4_is_streamed_packed_after_its_plan(outcomes: dict[str, Any], case: str) -> None:
    assert outcomes[case]["engine"] == "NvFp4Engine"
    assert outcomes[case]["first"] == PLAN_NAME
    assert outcomes[case]["packed"] == 6, "q, k, v, o and two matrices of fused experts"


def test_the_streams_bytes_arrive_at_rollouts_of_other_processes(outcomes: dict[str, Any]) -> None:
    """Through verl's own cutting and putting together, which its nccl transport uses too."""
    assert outcomes["qat"]["arrived"]


@pytest.mark.verl_table(
    "a user's `model.external_lib`, `checkpoint_engine.custom_backend_module`",
    "imported after this project's own",
)
def test_a_users_own_module_changes_nothing(outcomes: dict[str, Any]) -> None:
    found = outcomes["users module"]
    assert found["imported"] and found["engine"] == "NvFp4Engine" and found["packed"] == 6


def test_a_seed_in_the_configuration_takes_the_place_of_the_weights(
    outcomes: dict[str, Any],
) -> None:
    found = outcomes["seeded"]
    assert found["drawn"] and found["engine"] == "NvFp4Engine" and found["packed"] == 6


def test_enable_false_is_verls_own_engine_in_bf16(outcomes: dict[str, Any]) -> None:
    assert outcomes["bf16"]["engine"] == "FSDPEngineWithLMHead"
    assert outcomes["bf16"]["packed"] == 0 and outcomes["bf16"]["first"] != PLAN_NAME


@pytest.mark.verl_table("reference policy", "verl's own engine, nothing is packed: BF16 on purpose")
def test_a_reference_policy_is_verls_own_engine_in_bf16(outcomes: dict[str, Any]) -> None:
    assert outcomes["reference"]["engine"] == "FSDPEngineWithLMHead"
    assert outcomes["reference"]["packed"] == 0


@pytest.mark.verl_table(
    "`fsdp_config.model_dtype=bfloat16`, of actors and reference policies",
    "verl's cast to BF16 leaves the rotary embedding in FP32, as vLLM has it",
)
@pytest.mark.parametrize("case", ["bf16 masters", "reference"])
def test_rotary_embeddings_stay_in_fp32(outcomes: dict[str, Any], case: str) -> None:
    assert outcomes[case]["dtypes"] == ["torch.bfloat16", "torch.float32"]


@pytest.mark.verl_table("critic (PPO)", "verl's own engine")
def test_a_critic_is_verls_own_engine(outcomes: dict[str, Any]) -> None:
    assert outcomes["critic"]["engine"] == "FSDPEngineWithValueHead"


def test_attention_of_cudnn_is_off_once_the_engine_is_imported(outcomes: dict[str, Any]) -> None:
    """Its backward pass gives NaN: see `experiments.rl.policy.ATTENTION`."""
    assert outcomes["attention"]["cudnn"] == [True, False]


@pytest.mark.verl_table(
    "`fsdp_config.param_offload`: verl offloads the actor",
    "packed shards go too, and are made again",
)
def test_packed_shards_do_not_outlive_an_offload(outcomes: dict[str, Any]) -> None:
    found = outcomes["qat"]
    assert found["after_forward"] == found["after_next_forward"] == 6
    assert found["after_offload"] == 0


@pytest.mark.verl_table(
    "`rollout_correction.bypass_mode=false` of `separate_async` and `fully_async_policy`, with "
    "`fsdp_config.param_offload` or on a CPU",
    "no update is lost, with `+nvfp4=off` too, as this project's worker saves copies of weights",
)
@pytest.mark.parametrize("case", ["qat", "bf16", "not resharded"])
def test_no_update_is_lost_where_old_log_probs_are_of_older_weights(
    outcomes: dict[str, Any], case: str
) -> None:
    assert outcomes[case]["lost"] == []


QAT = "actor_rollout_ref.actor.fsdp_config.qat"
REFUSALS = {
    "lora": "actor_rollout_ref.model.lora_rank: no LoRA with NVFP4; set it to 0",
    "group size": f"{QAT}.group_size: 32: NVFP4 has blocks of 16",
    "scale": f"{QAT}.scale_policy: largest: Input should be 'pow2' or 'amax'",
    "mode": f"{QAT}.mode: w4a4: 4-bit activations are not supported",
    "adapters": "weight sync: this worker takes whole weights, no LoRA adapters",
    "everything ignored": "the recipe quantizes nothing",
}


@pytest.mark.verl_table(
    "LoRA, also with `merge=True`", "refused, with `+nvfp4=off` too", cases=["lora", "adapters"]
)
@pytest.mark.parametrize(("case", "message"), REFUSALS.items(), ids=REFUSALS)
def test_the_engine_refuses_what_was_not_refused_before(
    outcomes: dict[str, Any], case: str, message: str
) -> None:
    assert outcomes[case]["error"].startswith(message)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw, in one pair of processes: importing verl takes seconds."""
    folder = tmp_path_factory.mktemp("ranks")
    write_nano("nano-moe", folder / "model", num_layers=1)
    run_ranks(verl_ranks.look_at_engines, (2, str(folder / "model"), str(folder)), 2)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.verl_table(
    "`fsdp_config.model_dtype=bfloat16`, of actors and reference policies",
    "verl's cast to BF16 leaves the rotary embedding in FP32, as vLLM has it",
)
def test_rotary_embeddings_are_equal_in_fp32_where_one_rank_starts_without_weights(
    ranks: list[dict[str, Any]],
) -> None:
    first, second = (rank["rotary"] for rank in ranks)
    assert (first["weights made on"], second["weights made on"]) == ("cpu", "meta")
    assert first["dtype"] == second["dtype"] == "torch.float32"
    assert first["frequencies"] == second["frequencies"]
    assert first["frequencies"][0] == 1.0 and len(set(first["frequencies"])) > 1


@pytest.mark.verl_table(
    "`fsdp_config.reshard_after_forward=false`, steps that train the critic alone "
    "(`trainer.critic_warmup`)",
    "the sync brings the weights as they were",
)
@pytest.mark.parametrize("case", ["not resharded", "not resharded bf16"])
def test_a_forward_pass_alone_changes_nothing_in_the_stream(
    ranks: list[dict[str, Any]], case: str
) -> None:
    """It leaves whole weights where the shards were, which a stream must not take for them."""
    for rank in ranks:
        assert rank[case] == {"whole": True, "same names": True, "changed": []}


RANKS = 2


@pytest.mark.verl_table(
    "verl's checkpoints on two ranks, as `trainer.resume_mode=auto` loads them",
    "of the same batch, the step after loading equals the one after saving to the bit",
)
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """Output, which the loaded weights' new scales decide, and weights after the next step."""
    run_ranks(verl_ranks.resume, (RANKS, str(tmp_path)), RANKS)
    for rank in range(RANKS):
        same = json.loads((tmp_path / f"same{rank}.json").read_text())
        assert same == {"output": True, "weights": True}


ENGINES = {"r3": "NvFp4Engine", "r3 packed": "NvFp4Engine", "r3 bf16": "ReplayEngine"}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of all engines of `verl_replay.py`, in one process: importing verl takes seconds."""
    folder = tmp_path_factory.mktemp("replay")
    write_nano("nano-moe", folder / "moe", num_layers=2)
    write_nano("nano-dense", folder / "dense", num_layers=1)
    arguments = (folder / "moe", folder / "dense", folder / "facts.json")
    done = module("tests.integration.verl_replay", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "facts.json").read_text())


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
REFUSED_ROUTES = {
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
    assert found.keys() == REFUSED_ROUTES.keys()
    for name, message in REFUSED_ROUTES.items():
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
