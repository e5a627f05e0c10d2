"""A study with `trainer: verl`: what it may say, and the line that each error gets."""

import re
from pathlib import Path
from typing import Any

import pytest

from experiments.study.load import load_study
from experiments.study.schema import STUDIES
from tests.study_files import REMOVED, changed_study, study_content

VERL = study_content("verl_nano")
NANO = VERL["models"]["nano-moe-verl"]

VERL_ERRORS = {
    "rollout": ({"rollout": "eager"}, "rollout: verl rolls out with vllm, not eager; use vllm"),
    "no recipe": (
        {"models": {"m": {"kind": "scratch", "config": "experiments/models/nano-moe.json"}}},
        "models.m.recipe: missing; use one of nano, qwen3_30b_a3b, qwen3_8b",
    ),
    "unknown recipe": (
        {"models": {"m": NANO | {"recipe": "qwen3_8"}}},
        "models.m.recipe: no recipe qwen3_8; did you mean qwen3_8b?",
    ),
    "unknown variant": (
        {"variant": ["smoke", "shake"]},
        "variant: no recipe shake; did you mean smoke?",
    ),
    "uneven shares": (
        {"gpus": 3},
        "gpus: 3 does not divide rl.mini_batch_prompts times rl.responses_per_prompt, 32; use one",
    ),
    "micro-batches larger than a share": (
        {"gpus": 4},
        "rl.micro_batch_responses: 16 does not divide the 8 responses of a mini-batch on one of 4",
    ),
    "task without worked answers": (
        {"task": {"name": "dapo-math"}},
        "models.nano-dense-verl.pretrain: dapo-math has no worked answers; remove it",
    ),
    "scores other than 1 and 0": (
        {
            "models": {"m": NANO | {"pretrain": None}},
            "task": {"name": "dapo-math"},
            "rl/advantage": "reward",
        },
        "rl.advantage: reward is for answers scored 1 or 0, not as dapo-math's are; use group",
    ),
    "negative scores, judged by shares of the best": (
        {
            "models": {"m": NANO | {"pretrain": None}},
            "task": {"name": "dapo-math"},
            "judged_by": "collapse",
            "claims": REMOVED,
        },
        "judged_by: collapse is for answers scored 1 or 0, not as dapo-math's are; use parity",
    ),
    "scores lowered for long answers": (
        {"models": {"m": NANO | {"recipe": "qwen3_8b"}}, "rl/advantage": "reward"},
        "rl.advantage: reward is for answers scored 1 or 0, and reward.+reward_kwargs.overlong_",
    ),
    "scores of a cell lowered for long answers": (
        {
            "models": {"m": NANO | {"recipe": "qwen3_8b"}},
            "cells": {"a": {}, "b": {"advantage": "reward"}},
        },
        "cells.b.advantage: reward is for answers scored 1 or 0, and reward.+reward_kwargs.over",
    ),
    "checkpoints without optimizer states": (
        {"variant": "smoke"},
        "rl.save_every: 2 makes checkpoints to go on from, but variant smoke saves no optimizer",
    ),
    "checkpoints without optimizer states in a longer cell": (
        {"variant": "smoke", "cells": {"a": {}, "b": {"steps": 50}}},
        "rl.save_every: 2 makes checkpoints to go on from, but variant smoke saves no optimizer "
        "states; use cells.b.steps, 50, or another variant",
    ),
    "drift that verl does not watch": (
        {"rl/drift_every": 1},
        "rl.drift_every: only trainer: local watches the drift of weights; remove it",
    ),
    "gate before the first checkpoint": (
        {"kl_gate": {"max_k3_kl": 1.0, "steps": VERL["rl"]["save_every"] - 1}},
        "kl_gate.steps: 1 may end a run before its first checkpoint, which is evaluated; use",
    ),
    "replay of the local trainer": (
        {"rl/routing_replay": True},
        "rl.routing_replay: only trainer: local knows True; remove it",
    ),
    "correction of the local trainer in a cell": (
        {"cells": {"a": {}, "x": {"correction": "sequence_mask"}}},
        "cells.x.correction: only trainer: local knows sequence_mask; use one of token_tis",
    ),
}


@pytest.mark.parametrize(("changes", "line"), VERL_ERRORS.values(), ids=VERL_ERRORS.keys())
def test_error_of_a_verl_study(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as caught:
        changed_study(tmp_path, changes, "verl_nano")
    assert str(caught.value).startswith(f"{tmp_path}/study.yaml: {line}")


def test_long_answers_may_lower_the_scores_of_other_cells(tmp_path: Path) -> None:
    cells = {"a": {"models": ["m"], "advantage": "reward"}, "b": {"models": ["lowered"]}}
    models = {"m": NANO, "lowered": NANO | {"recipe": "qwen3_8b"}}
    study = changed_study(tmp_path, {"models": models, "cells": cells}, "verl_nano")
    assert study.rl_of("a").advantage == "reward"


@pytest.mark.parametrize(
    ("study", "changes", "message"),
    [
        (
            "verl_gpu",
            {"variant": []},
            "gpu_memory_gib: vLLM asleep counts the memory of other runs; set",
        ),
        ("qwen3_smoke", {"variant": ["smoke", "wide"]}, "gpu_memory_gib: vLLM measures memory"),
        ("verl_gpu", {"variant": ["smoke", "wide"]}, "gpu_memory_gib: vLLM does not start beside"),
        ("verl_nano", {"variant": "wide"}, "gpu_memory_gib: runs share GPUs with device: cuda"),
    ],
    ids=["sleep", "size of cache", "free memory", "cpu"],
)
def test_runs_of_verl_that_cannot_share_a_gpu(
    tmp_path: Path, study: str, changes: dict[str, Any], message: str
) -> None:
    steps = study_content(study)["rl"]["save_every"]
    with pytest.raises(ValueError, match=re.escape(message)):
        changed_study(tmp_path, changes | {"rl/steps": steps, "gpu_memory_gib": 8}, study)


def test_prompts_from_files_are_not_counted(tmp_path: Path) -> None:
    models = {"m": NANO | {"pretrain": None}}
    task = {"name": "dapo-math", "train_prompts": 1, "test_prompts": 1}
    study = changed_study(tmp_path, {"models": models, "task": task}, "verl_nano")
    assert study.rl.prompts_per_step > 1 and study.evaluation.prompts > 1


def test_micro_batches_by_tokens_need_not_divide_a_share(tmp_path: Path) -> None:
    study = changed_study(tmp_path, {"rl/micro_batch_responses": 7}, "qwen3")
    assert study.rl.micro_batch_responses == 7


def test_recipe_is_part_of_what_decides_a_verl_run() -> None:
    study = load_study(STUDIES / "verl_nano.yaml")
    config = study.training_config(study.find_run("nano-moe-verl_nvfp4-qat_seed0"))
    assert config["recipe"]["sampler"] == "quick" and config["gpus"] == 2
    assert not any("+" in key for key in config["recipe"])  # MLflow would refuse the run


def test_of_several_variants_the_last_one_decides(tmp_path: Path) -> None:
    eager, graphs = "enforce_eager", "cudagraph_capture_sizes"
    utilization = "gpu_memory_utilization"
    found = {}
    for variant in ("smoke", ["smoke", "cautious"]):
        changes = {"variant": variant, "rl/steps": VERL["rl"]["save_every"]}
        study = changed_study(tmp_path, changes, "verl_nano")
        recipe = study.recipe_of(study.runs[0])
        settings = {key.rpartition(".")[2]: it.value for key, it in recipe.items()}
        found[str(variant)] = [settings.get(key) for key in (utilization, eager, graphs)]
    sizes = [1, 2, 4, 8, 16, 32, 64]
    assert list(found.values()) == [[0.6, None, sizes], [0.5, True, sizes]]
