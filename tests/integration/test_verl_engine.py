"""The engine that verl's registry makes of a command: its class, its stream, what it refuses."""

import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from experiments.study.schema import ROOT
from qat_core.weights.transfer import PLAN_NAME
from tests.nano_models import write_nano

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of all cases of `verl_engine.py`, in one process: importing verl takes seconds."""
    folder = tmp_path_factory.mktemp("engine")
    write_nano("nano-moe", folder / "model", num_layers=1)
    program = [sys.executable, "-m", "tests.integration.verl_engine"]
    command = [*program, str(folder / "model"), str(folder / "outcomes.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    content: dict[str, dict[str, Any]] = json.loads((folder / "outcomes.json").read_text())
    return content


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
