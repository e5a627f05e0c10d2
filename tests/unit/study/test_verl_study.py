"""A study with `trainer: verl`: what it may say, and the line that each error gets."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.study.load import load_study
from experiments.study.schema import STUDIES

VERL: dict[str, Any] = yaml.safe_load((STUDIES / "verl_nano.yaml").read_text())


VERL_ERRORS = {
    "rollout": ({"rollout": "eager"}, "rollout: verl rolls out with vllm, not eager; use vllm"),
    "no recipe": (
        {"models": {"m": {"kind": "scratch", "config": "experiments/models/nano-moe.json"}}},
        "models.m.recipe: missing; use one of nano, qwen3_30b_a3b, qwen3_8b",
    ),
    "unknown recipe": (
        {"models": {"m": VERL["models"]["nano-moe-verl"] | {"recipe": "qwen3_8"}}},
        "models.m.recipe: no recipe qwen3_8; did you mean qwen3_8b?",
    ),
    "unknown variant": ({"variant": "shake"}, "variant: no recipe shake; did you mean smoke?"),
    "unknown one of several": (
        {"variant": ["smoke", "shake"]},
        "variant: no recipe shake; did you mean smoke?",
    ),
    "top_p": (
        {"rl": VERL["rl"] | {"rollout": {"top_p": 0.9}}},
        "rl.rollout.top_p: 0.9 would bias the ratio between trainer and rollout; use 1.0",
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
            "models": {"m": {**VERL["models"]["nano-moe-verl"], "pretrain": None}},
            "task": {"name": "dapo-math"},
            "rl": VERL["rl"] | {"advantage": "reward"},
        },
        "rl.advantage: reward is for answers scored 1 or 0, not as dapo-math's are; use group",
    ),
    "negative scores, judged by shares of the best": (
        {
            "models": {"m": {**VERL["models"]["nano-moe-verl"], "pretrain": None}},
            "task": {"name": "dapo-math"},
            "judged_by": "collapse",
            "claims": None,
        },
        "judged_by: collapse is for answers scored 1 or 0, not as dapo-math's are; use parity",
    ),
    "scores lowered for long answers": (
        {
            "models": {"m": VERL["models"]["nano-moe-verl"] | {"recipe": "qwen3_8b"}},
            "rl": VERL["rl"] | {"advantage": "reward"},
        },
        "rl.advantage: reward is for answers scored 1 or 0, and reward.+reward_kwargs.overlong_",
    ),
    "scores of a cell lowered for long answers": (
        {
            "models": {"m": VERL["models"]["nano-moe-verl"] | {"recipe": "qwen3_8b"}},
            "cells": {"a": {}, "b": {"advantage": "reward"}},
        },
        "cells.b.advantage: reward is for answers scored 1 or 0, and reward.+reward_kwargs.over",
    ),
    "checkpoints without optimizer states": (
        {"variant": "smoke"},
        "rl.save_every: 2 makes checkpoints to go on from, but variant smoke saves no optimizer",
    ),
    "checkpoints without optimizer states in a cell": (
        {"variant": "smoke", "cells": {"a": {"steps": 1}, "b": {}}},
        "rl.save_every: 2 makes checkpoints to go on from, but variant smoke saves no optimizer",
    ),
    "checkpoints without optimizer states in a longer cell": (
        {"variant": "smoke", "cells": {"a": {}, "b": {"steps": 50}}},
        "rl.save_every: 2 makes checkpoints to go on from, but variant smoke saves no optimizer "
        "states; use cells.b.steps, 50, or another variant",
    ),
    "unknown key of the gate": (
        {"kl_gate": {"max_k3": 1.0, "max_k3_kl": 1.0, "steps": 1}},
        "kl_gate.max_k3: unknown key; did you mean max_k3_kl?",
    ),
    "drift that verl does not watch": (
        {"rl": VERL["rl"] | {"drift_every": 1}},
        "rl.drift_every: only trainer: local watches the drift of weights; remove it",
    ),
    "gate before the first checkpoint": (
        {"kl_gate": {"max_k3_kl": 1.0, "steps": VERL["rl"]["save_every"] - 1}},
        "kl_gate.steps: 1 may end a run before its first checkpoint, which is evaluated; use",
    ),
    "gate": ({"kl_gate": {"max_k3_kl": 0, "steps": 1}}, "kl_gate.max_k3_kl: 0 does not fit, it"),
}


@pytest.mark.parametrize(("changes", "line"), VERL_ERRORS.values(), ids=VERL_ERRORS.keys())
def test_error_of_a_verl_study(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    path = tmp_path / "study.yaml"
    content = {key: value for key, value in (VERL | changes).items() if value is not None}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError) as caught:
        load_study(path)
    assert str(caught.value).startswith(f"{path}: {line}")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "rl/correction",
            "sequence_mask",
            "rl.correction: only trainer: local knows sequence_mask; use one of token_tis, none",
        ),
        ("rl/routing_replay", True, "rl.routing_replay: only trainer: local knows True; remove it"),
        (
            "rl/measure_drift_term",
            True,
            "rl.measure_drift_term: only trainer: local knows True; remove it",
        ),
        (
            "cells",
            {"a": {}, "x": {"correction": "sequence_mask"}},
            "cells.x.correction: only trainer: local knows sequence_mask; use one of token_tis",
        ),
    ],
)
def test_verl_refuses_what_only_the_local_trainer_knows(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    content = yaml.safe_load((STUDIES / "verl_nano.yaml").read_text())
    section, _, last = key.rpartition("/")
    (content[section] if section else content)[last] = value
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_study(path)


def test_long_answers_may_lower_the_scores_of_other_cells(tmp_path: Path) -> None:
    moe = VERL["models"]["nano-moe-verl"]
    cells = {"a": {"models": ["m"], "advantage": "reward"}, "b": {"models": ["lowered"]}}
    models = {"m": moe, "lowered": moe | {"recipe": "qwen3_8b"}}
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(VERL | {"models": models, "cells": cells}))
    assert load_study(path).rl_of("a").advantage == "reward"


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
    content = yaml.safe_load((STUDIES / f"{study}.yaml").read_text())
    content["rl"]["steps"] = content["rl"]["save_every"]
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content | changes | {"gpu_memory_gib": 8}))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_study(path)


def test_prompts_from_files_are_not_counted(tmp_path: Path) -> None:
    models = {"m": {**VERL["models"]["nano-moe-verl"], "pretrain": None}}
    task = {"name": "dapo-math", "train_prompts": 1, "test_prompts": 1}
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(VERL | {"models": models, "task": task}))
    study = load_study(path)
    assert study.rl.prompts_per_step > 1 and study.evaluation.prompts > 1


def test_micro_batches_by_tokens_need_not_divide_a_share(tmp_path: Path) -> None:
    study = yaml.safe_load((STUDIES / "qwen3.yaml").read_text())
    study["rl"]["micro_batch_responses"] = 7
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(study))
    assert load_study(path).rl.micro_batch_responses == 7


def test_recipe_is_part_of_what_decides_a_verl_run() -> None:
    study = load_study(STUDIES / "verl_nano.yaml")
    config = study.training_config(study.find_run("nano-moe-verl_nvfp4-qat_seed0"))
    assert config["recipe"]["sampler"] == "quick" and config["gpus"] == 2
    assert not any("+" in key for key in config["recipe"])  # MLflow would refuse the run


def test_of_several_variants_the_last_one_decides(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    eager, graphs = "enforce_eager", "cudagraph_capture_sizes"
    utilization = "gpu_memory_utilization"
    found = {}
    for variant in ("smoke", ["smoke", "cautious"]):
        rl = VERL["rl"] | {"steps": VERL["rl"]["save_every"]}
        path.write_text(yaml.safe_dump(VERL | {"variant": variant, "rl": rl}))
        study = load_study(path)
        recipe = study.recipe_of(study.runs[0])
        settings = {key.rpartition(".")[2]: it.value for key, it in recipe.items()}
        found[str(variant)] = [settings.get(key) for key in (utilization, eager, graphs)]
    sizes = [1, 2, 4, 8, 16, 32, 64]
    assert list(found.values()) == [[0.6, None, sizes], [0.5, True, sizes]]
