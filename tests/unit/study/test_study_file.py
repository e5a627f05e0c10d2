"""A study file: what it may say, and the one line that each error gets."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.study.load import OLD_KEYS, load_study
from experiments.study.schema import STUDIES, Claims, Run, Study
from experiments.study.yaml_file import read_yaml
from qat_core.rl.config import TaskConfig
from qat_core.rl.tasks import GENERATED_TASKS, make_problems

GOOD: dict[str, Any] = yaml.safe_load((STUDIES / "default.yaml").read_text())


def load_changed(tmp_path: Path, keys: str, value: Any) -> Study:
    """The default study with one dotted key changed."""
    content = deepcopy(GOOD)
    section = content
    *parents, last = keys.split("/")
    for key in parents:
        section = section[key]
    section[last] = value
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_study(path)


ERRORS = {
    "unknown key": ("sedes", [0], "sedes: unknown key; did you mean seeds?"),
    "unknown key, no near one": ("zzz", 1, "zzz: unknown key; known keys: arms, block_scale"),
    "unknown key in a section": ("rl/stepz", 3, "rl.stepz: unknown key; did you mean steps?"),
    "unknown key two sections down": (
        "rl/rollout/max_prompt_token",
        9,
        "rl.rollout.max_prompt_token: unknown key; did you mean max_prompt_tokens?",
    ),
    "unknown key of a model": (
        "models/nano-moe/pretrain/step",
        9,
        "models.nano-moe.pretrain.step: unknown key; did you mean steps?",
    ),
    "unknown kind of model": ("models/nano-moe/kind", "gg", "models.nano-moe.kind: 'gg' is not"),
    "model without a kind": ("models/x", {}, "models.x.kind: missing; use one of scratch, gguf"),
    "model's name": ("models/a_b", GOOD["models"]["nano-moe"], "models.a_b: 'a_b' does not fit"),
    "missing key": ("models/x", {"kind": "gguf", "file": "f"}, "models.x.package: missing; add it"),
    "wrong type": ("rl/steps", "many", "rl.steps: 'many' does not fit, it should be a valid int"),
    "out of range": ("rl/steps", 0, "rl.steps: 0 does not fit, it should be greater than or equal"),
    "no section": ("rl", None, "rl: None is not a section; write its keys below it, indented"),
    "no list": ("seeds", 3, "seeds: 3 does not fit, it should be a valid list"),
    "empty list": ("arms", [], "arms: empty; name at least one"),
    "unknown arm": ("arms", ["bf16", "nvfp5"], "arms.1: 'nvfp5' is not allowed; use 'bf16', 'nv"),
    "arm twice": ("arms", ["bf16", "bf16"], "arms: bf16 is listed twice; remove one"),
    "seed twice": ("seeds", [1, 0, 1], "seeds: 1 is listed twice; remove one"),
    "negative seed": ("seeds", [-1], "seeds.0: -1 does not fit, it should be greater than or"),
    "missing file": (
        "models/nano-moe/config",
        "none.json",
        "models.nano-moe.config: no file none.json; paths are relative to the repository root",
    ),
    "hub model, local trainer": (
        "models/x",
        {"kind": "hub", "config": "experiments/models/nano-moe.json", "repo": "a/b"},
        "models.x.kind: the local trainer loads no hub checkpoint; use trainer: verl",
    ),
    "recipe, local trainer": (
        "models/nano-moe/recipe",
        "nano",
        "models.nano-moe.recipe: only trainer: verl reads it; remove it",
    ),
    "variant, local trainer": ("variant", "x", "variant: only trainer: verl reads it; remove it"),
    "replay, dense model": (
        "rl/routing_replay",
        True,
        "rl.routing_replay: nano-dense has no experts; remove the key, or set it in cells of other",
    ),
    "GPUs, local trainer": ("gpus", 2, "gpus: only trainer: verl reads it; remove it"),
    "terms from much to little": (
        "task/terms",
        [5, 3],
        "task.terms: [5, 3] is not a range;",
    ),
    "no terms": (
        "task/terms",
        [0, 0],
        "task.terms: [0, 0] is not a range; use 1 <= fewest",
    ),
    "fewer prompts than a step draws": (
        "task/train_prompts",
        15,
        "rl.prompts_per_step: 16 is more than task.train_prompts, 15; lower it or raise train_p",
    ),
    "problems of a small range": (
        "task/largest",
        1,
        "task: terms [4, 10] and largest 1 give only 7 different problems, not 4352; widen them",
    ),
    "task of verl, local trainer": (
        "task",
        {"name": "dapo-math"},
        "task.name: only trainer: verl reads the files of dapo-math; use verl",
    ),
    "more prompts than are held out": (
        "task/test_prompts",
        8,
        "evaluation.prompts: 256 is more than task.test_prompts, 8; lower it or raise test_prompts",
    ),
    "terms beyond any study": (
        "task/terms",
        [3, 1_000_000],
        "task.terms: [3, 1000000] is not a range; use 1 <= fewest <= most <= 100",
    ),
    "numbers beyond any study": (
        "task/largest",
        10**18,
        "task.largest: 1000000000000000000 does not fit, it should be less than or equal to 10000",
    ),
    "truth value for a number": (
        "rl/steps",
        True,
        "rl.steps: true is not a number; write a number",
    ),
    "truth value in a list": ("seeds", [1, False], "seeds.1: false is not a number; write a numb"),
    "infinite rate": ("rl/lr", float("inf"), "rl.lr: inf does not fit, it should be a finite num"),
    "rate that is not a number": ("rl/lr", float("nan"), "rl.lr: nan does not fit, it should be"),
    "infinite claim": ("claims/reward_gain", float("inf"), "claims.reward_gain: inf does not fit"),
    "seed of 65 bits": ("seeds", [2**64], "seeds.0: 18446744073709551616 does not fit, it should"),
    "steps beyond any study": ("rl/steps", 10**9, "rl.steps: 1000000000 does not fit, it should"),
    "mini batch": ("rl/mini_batch_prompts", 7, "rl.mini_batch_prompts: 7 does not divide rl.pro"),
    "sampling that biases the ratio": ("rl/rollout/top_k", 20, "rl.rollout.top_k: 20 would bias"),
}


@pytest.mark.parametrize(("keys", "value", "line"), ERRORS.values(), ids=ERRORS.keys())
def test_error_names_file_key_and_hint(tmp_path: Path, keys: str, value: object, line: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_changed(tmp_path, keys, value)
    assert str(caught.value).startswith(f"{tmp_path}/study.yaml: {line}")
    assert len(str(caught.value).splitlines()) == 1


def test_several_errors_get_one_line_each(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(GOOD | {"seeds": "x", "zzz": 1}))
    with pytest.raises(ValueError) as caught:
        load_study(path)
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == ["seeds", "zzz"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rl: {steps: 1\n", "line 2: expected ',' or '}', but got '<stream end>'; fix the YAML"),
        ("seeds: [0]\nseeds: [1]\n", "line 2: key 'seeds' is there twice; fix the YAML"),
        ("study: {{ name }}\n", "line 1: found unhashable key; fix the YAML"),
        ("models: {[a]: 1}\n", "line 1: found unhashable key; fix the YAML"),
        ("- 1\n", "not a mapping of keys"),
        ("", "not a mapping of keys"),
        ("\x00", "not YAML text: unacceptable character #x0000"),
    ],
    ids=["unclosed", "key twice", "template", "list as a key", "list", "empty", "binary"],
)
def test_broken_yaml(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        load_study(path)
    assert str(caught.value).startswith(f"{path}: {line}")


@pytest.mark.parametrize(
    ("text", "merged"),
    [
        ("a: &x {k: 1, j: 2}\nb: {<<: *x, k: 3}\n", {"b": {"k": 3, "j": 2}}),
        # the inner mapping's keys are merged into `b` before the inner mapping itself is read
        ("a: {i: &x {<<: {k: 1}, k: 2}}\nb: {<<: *x}\n", {"a": {"i": {"k": 2}}, "b": {"k": 2}}),
    ],
    ids=["overridden", "overridden where it is merged from"],
)
def test_merge_keys(tmp_path: Path, text: str, merged: dict[str, Any]) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text(text)
    assert read_yaml(path).items() >= merged.items()


def test_old_keys_are_read_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "study.yaml"
    new = GOOD | {"scale_policy": "amax", "block_scale_method": "mse"}
    old = {key: value for key, value in new.items() if key not in OLD_KEYS.values()}
    path.write_text(yaml.safe_dump(old | {"scale": "amax", "block_scale": "mse"}))
    assert load_study(path) == Study.model_validate(new)
    names = "scale is now called scale_policy, block_scale is now called block_scale_method"
    assert capsys.readouterr().err == f"note: {path}: {names}\n"
    path.write_text(yaml.safe_dump(new | {"scale": "amax"}))
    with pytest.raises(ValueError, match="scale: is now called scale_policy, which is there too"):
        load_study(path)


def test_removed_keys_are_left_out_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(GOOD | {"claims": {"accuracy_margin": 0.05}}))
    assert load_study(path).claims == Claims()
    assert (
        capsys.readouterr().err == f"note: {path}: claims.accuracy_margin means nothing any more\n"
    )
    path.write_text(yaml.safe_dump(GOOD | {"claims": 3}))
    with pytest.raises(ValueError, match="claims: 3 is not a section"):
        load_study(path)


def test_missing_study_file(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"none\.yaml: no such study file; see experiments/studies"
    ):
        load_study(tmp_path / "none.yaml")


def test_runs_are_models_times_arms_times_seeds() -> None:
    study = load_study(STUDIES / "default.yaml")
    assert len(study.runs) == len(study.models) * len(study.arms) * len(study.seeds)
    assert len({run.id for run in study.runs}) == len(study.runs)
    assert study.find_run("nano-moe_nvfp4-qat_seed1") == Run("nano-moe", "nvfp4-qat", 1)


def test_unknown_run_lists_those_that_there_are() -> None:
    study = load_study(STUDIES / "default.yaml")
    with pytest.raises(ValueError, match="has no run 'x'; it has nano-dense_bf16_seed0, "):
        study.find_run("x")


def test_training_config_holds_what_decides_the_training_and_no_more(tmp_path: Path) -> None:
    run = load_study(STUDIES / "default.yaml").runs[0]
    plain = load_changed(tmp_path, "study", "default").training_config(run)
    assert load_changed(tmp_path, "claims/qat_kl_ratio", 9.0).training_config(run) == plain
    assert load_changed(tmp_path, "evaluation/prompts", 9).training_config(run) == plain
    assert load_changed(tmp_path, "rl/lr", 1e-9).training_config(run) != plain
    assert load_changed(tmp_path, "task/largest", 7).training_config(run) != plain


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
    path.write_text(yaml.safe_dump(VERL | changes))
    with pytest.raises(ValueError) as caught:
        load_study(path)
    assert str(caught.value).startswith(f"{path}: {line}")


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


@pytest.mark.parametrize("name", GENERATED_TASKS)
def test_task_may_use_up_the_problems_that_there_are(tmp_path: Path, name: str) -> None:
    num_problems = {"chain-sum": 4 + 16, "word-problem": 36 * (4 + 16)}[name]
    task = {"name": name, "terms": [1, 2], "largest": 4, "test_prompts": 1}
    with pytest.raises(ValueError, match=f"give only {num_problems} different problems, not"):
        load_changed(tmp_path, "task", task | {"train_prompts": num_problems})
    drawn = make_problems(TaskConfig(**task, train_prompts=num_problems - 1), "train")
    assert len(drawn) == num_problems - 1


def test_recipe_is_part_of_what_decides_a_verl_run() -> None:
    study = load_study(STUDIES / "verl_nano.yaml")
    config = study.training_config(study.find_run("nano-moe-verl_nvfp4-qat_seed0"))
    assert config["recipe"]["sampler"] == "quick" and config["gpus"] == 2
    assert not any("+" in key for key in config["recipe"])  # MLflow would refuse the run


def test_studies_name_their_models_apart() -> None:
    """Runs are found by name in `results`: of equal names, one study would redo the other's."""
    files = sorted(STUDIES.glob("*.yaml"))
    names = [name for file in files for name in load_study(file).models]
    assert len(names) == len(set(names))


CELLS = {
    "low": {"lr": 1e-5},
    "masked": {"arms": ["nvfp4-noqat"], "correction": "sequence_mask", "models": ["nano-moe"]},
}


def test_cells_are_runs_of_their_own(tmp_path: Path) -> None:
    study = load_changed(tmp_path, "cells", CELLS)
    assert len(study.runs) == (2 * 4 + 1) * len(study.seeds)
    assert len({run.id for run in study.runs}) == len(study.runs)
    low = study.find_run("nano-dense_bf16.low_seed0")
    masked = study.find_run("nano-moe_nvfp4-noqat.masked_seed2")
    assert study.rl_of(low.cell).lr == 1e-5
    assert study.rl_of(masked.cell) == study.rl.model_copy(update={"correction": "sequence_mask"})
    config = study.training_config(masked)
    assert (config["cell"], config["rl"]["correction"]) == ("masked", "sequence_mask")
    assert [run.arm for run in study.runs[:4]] == list(study.arms), "arms of a seed in a row"


def test_a_cell_replays_routes_in_models_with_experts(tmp_path: Path) -> None:
    cells = {"plain": {}, "r3": {"models": ["nano-moe"], "routing_replay": True}}
    study = load_changed(tmp_path, "cells", cells)
    replaying = {run.model for run in study.runs if study.rl_of(run.cell).routing_replay}
    assert replaying == {"nano-moe"}
    with pytest.raises(ValueError, match="routing_replay: nano-dense has no experts"):
        load_changed(tmp_path, "cells", {"r3": {"routing_replay": True}})


def test_without_cells_a_run_has_none() -> None:
    study = load_study(STUDIES / "default.yaml")
    assert "cell" not in study.training_config(study.runs[0])
    assert study.rl_of(None) is study.rl


def test_seeds_may_have_bases_of_their_own(tmp_path: Path) -> None:
    shared, own = (load_changed(tmp_path, "own_base", value) for value in (False, True))
    run = shared.find_run("nano-moe_bf16_seed2")
    assert (shared.base_of(run), own.base_of(run)) == ("nano-moe", "nano-moe_seed2")
    assert shared.bases == {name: (name, 0) for name in shared.models}
    assert own.bases["nano-moe_seed2"] == ("nano-moe", 2)
    assert set(own.bases) == {own.base_of(run) for run in own.runs}


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        pytest.param({"lrr": 1.0}, "cells.x.lrr: unknown key; did you mean lr?", id="unknown key"),
        pytest.param({"lr": -1.0}, "cells.x.lr: -1.0 does not fit", id="out of range"),
        pytest.param({"arms": ["bf15"]}, "cells.x.arms.0: 'bf15' is not allowed", id="unknown arm"),
        pytest.param({"models": ["m"]}, "cells.x.models: m is not in the study", id="no model"),
        pytest.param(
            {"correction": "score_centering"},
            "cells.x: correction: score_centering is defined for one update a batch",
            id="does not fit rl",
        ),
    ],
)
def test_cells_that_do_not_fit_are_refused(
    tmp_path: Path, cell: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load_changed(tmp_path, "cells", {"x": cell})


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
        ("cells", {"x": {}}, "cells: only trainer: local reads it; remove it"),
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
