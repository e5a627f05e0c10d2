"""The local trainer with vLLM as its rollout engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from vllm.distributed import cleanup_dist_env_and_memory

from experiments.rl.trainer import GrpoTrainer
from experiments.study.arms import ArmName, make_recipes
from tests.nano_models import CONFIG, nano_trainer, write_nano

TWO_STEPS = CONFIG.model_copy(
    update={"steps": 2, "mini_batch_prompts": 4, "micro_batch_responses": 16, "save_every": 1}
)


@pytest.fixture(scope="module", params=["nano-dense", "nano-moe"])
def base_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """Two layers of the architecture, random weights."""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    write_nano(request.param, folder, num_layers=2)
    yield folder
    cleanup_dist_env_and_memory()  # a MoE model needs other process groups than a dense one


def _train(base_dir: Path, arm_name: ArmName, checkpoints: Path) -> tuple[GrpoTrainer, list[dict]]:
    rows: list[dict[str, float]] = []
    trainer = nano_trainer(base_dir, checkpoints, *make_recipes(arm_name), TWO_STEPS, "vllm")
    trainer.train(lambda step, metrics: rows.append(metrics))
    return trainer, rows


def test_qat_agrees_with_vllm_and_no_qat_does_not(base_dir: Path, tmp_path: Path) -> None:
    k3 = {}
    for arm in ("bf16", "nvfp4-qat", "nvfp4-noqat"):
        trainer, rows = _train(base_dir, arm, tmp_path / arm)
        assert len(rows) == 2 and all(row["response_length/mean"] > 1 for row in rows)
        served = {row["name"] for row in trainer.coverage() if row["served"]}
        assert served == (set(trainer.plan.quantized) if trainer.plan else set())
        k3[arm] = sum(row["rollout_corr/k3_kl"] for row in rows) / 2
    # over 4 seeds: no QAT at least 29 (MoE) and 800 (dense) times the larger of the others
    assert k3["nvfp4-noqat"] > 10 * max(k3["bf16"], k3["nvfp4-qat"])
