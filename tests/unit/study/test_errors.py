"""Each error in a study of the local trainer, its YAML or its models gets one line with the fix."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.rl.config import TaskConfig
from experiments.rl.tasks import GENERATED_TASKS, make_problems
from experiments.study.load import load_study
from experiments.study.model_config import read_model_config
from experiments.study.schema import ROOT
from experiments.study.yaml_file import read_yaml
from experiments.support.json_files import read_json
from tests.study_files import REMOVED, changed_study, study_content

NANO = study_content("default_long")["models"]["nano-moe"]

ERRORS = {
    "exact on a CPU": ("exact", True, "device: cpu: exact arms were proven with cuda only"),
    "unknown key, no near one": ("zzz", 1, "zzz: unknown key; known keys: arms, block_scale"),
    "unknown key of a model": (
        "models/nano-moe/pretrain/step",
        9,
        "models.nano-moe.pretrain.step: unknown key; did you mean steps?",
    ),
    "unknown kind of model": ("models/nano-moe/kind", "gg", "models.nano-moe.kind: 'gg' is not"),
    "model without a kind": ("models/x", {}, "models.x.kind: missing; use one of scratch, gguf"),
    "model's name": ("models/a_b", NANO, "models.a_b: 'a_b' does not fit"),
    "missing key": ("models/x", {"kind": "gguf", "file": "f"}, "models.x.package: missing; add it"),
    "wrong type": ("rl/steps", "many", "rl.steps: 'many' does not fit, it should be a valid int"),
    "out of range": ("rl/steps", 0, "rl.steps: 0 does not fit, it should be greater than or equal"),
    "no section": ("rl", None, "rl: None is not a section; write its keys below it, indented"),
    "no list": ("seeds", 3, "seeds: 3 does not fit, it should be a valid list"),
    "empty list": ("arms", [], "arms: empty; name at least one"),
    "unknown arm": ("arms", ["bf16", "nvfp5"], "arms.1: 'nvfp5' is not allowed; use 'bf16', 'nv"),
    "arm twice": ("arms", ["bf16", "bf16"], "arms: bf16 is listed twice; remove one"),
    "missing file with a line break": (
        "models/nano-moe/config",
        "no\nne.json",
        "models.nano-moe.config: no file no ne.json; paths are relative to the repository root",
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
    "tolerances of claims that are not judged": (
        "judged_by",
        "collapse",
        "claims: only judged_by: parity reads it; remove it",
    ),
    "a claim of collapses": (
        "primary",
        "C9",
        "primary: only judged_by: collapse reads it; remove it",
    ),
    "terms from much to little": ("task/terms", [5, 3], "task.terms: [5, 3] is not a range;"),
    "no terms": ("task/terms", [0, 0], "task.terms: [0, 0] is not a range; use 1 <= fewest"),
    "terms beyond any study": ("task/terms", [3, 10**6], "task.terms: [3, 1000000] is not a range"),
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
    "truth value for a number": ("rl/steps", True, "rl.steps: true is not a number; write a num"),
    "truth value in a list": ("seeds", [1, False], "seeds.1: false is not a number; write a numb"),
    "stopped before mixed steps": (
        "models/nano-moe/pretrain",
        {"steps": 200, "mixed_steps": 9, "stop_accuracy": 0.2},
        "models.nano-moe.pretrain: mixed_steps: 9 of 200: with stop_accuracy training may end",
    ),
    "drift not seen at checkpoints": (
        "rl/drift_every",
        3,
        "rl: drift_every: 3 does not divide save_every, 10: a run that is resumed would not know",
    ),
    "infinite rate": ("rl/lr", float("inf"), "rl.lr: inf does not fit, it should be a finite num"),
    "seed of 65 bits": ("seeds", [2**64], "seeds.0: 18446744073709551616 does not fit, it should"),
    "steps beyond any study": ("rl/steps", 10**9, "rl.steps: 1000000000 does not fit, it should"),
    "mini batch": ("rl/mini_batch_prompts", 7, "rl.mini_batch_prompts: 7 does not divide rl.pro"),
    "sampling that biases the ratio": ("rl/rollout/top_k", 20, "rl.rollout.top_k: 20 would bias"),
    "nucleus sampling": ("rl/rollout/top_p", 0.9, "rl.rollout.top_p: 0.9 would bias the ratio"),
}


@pytest.mark.parametrize(("keys", "value", "line"), ERRORS.values(), ids=ERRORS)
def test_error_names_file_key_and_hint(tmp_path: Path, keys: str, value: object, line: str) -> None:
    with pytest.raises(ValueError) as caught:
        changed_study(tmp_path, {keys: value})
    assert str(caught.value).startswith(f"{tmp_path}/study.yaml: {line}")
    assert len(str(caught.value).splitlines()) == 1


def test_several_errors_get_one_line_each(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        changed_study(tmp_path, {"seeds": "x", "zzz": 1})
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == ["seeds", "zzz"]


def test_missing_study_file(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"none\.yaml: no such study file; see experiments/studies"
    ):
        load_study(tmp_path / "none.yaml")


@pytest.mark.parametrize("name", GENERATED_TASKS)
def test_task_may_use_up_the_problems_that_there_are(tmp_path: Path, name: str) -> None:
    num_problems = {"chain-sum": 4 + 16, "word-problem": 36 * (4 + 16)}[name]
    task = {"name": name, "terms": [1, 2], "largest": 4, "test_prompts": 1}
    with pytest.raises(ValueError, match=f"give only {num_problems} different problems, not"):
        changed_study(tmp_path, {"task": task | {"train_prompts": num_problems}})
    drawn = make_problems(TaskConfig(**task, train_prompts=num_problems - 1), "train")
    assert len(drawn) == num_problems - 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rl: {steps: 1\n", "line 2: expected ',' or '}', but got '<stream end>'; fix the YAML"),
        ("seeds: [010]\n", "line 1: 010 counts in eights or sixties in YAML; fix the YAML"),
        ("seeds: [0]\nseeds: [1]\n", "line 2: key 'seeds' is there twice; fix the YAML"),
        ("study: {{ name }}\n", "line 1: found unhashable key; fix the YAML"),
        ("- 1\n", "not a mapping of keys"),
        ("", "not a mapping of keys"),
        ("rl:\n\tsteps: 1\n", "line 2: found character '\\t' that cannot start any token"),
        ("rl: !x 1\n", "line 1: could not determine a constructor for the tag '!x'"),
        ("rl: *x\n", "line 1: found undefined alias 'x'"),
        ("study: caf\xe9\n", "not YAML text: 'utf-8' codec can't decode byte 0xe9"),
        ("\x00", "not YAML text: unacceptable character #x0000"),
        ("study: 2024-13-45\n", "not YAML text: month must be in 1..12"),
        ("study: !!bool abc\n", "not YAML text: 'abc'"),
        ("study: !!timestamp foo\n", "not YAML text: "),
        ("a: " + "[" * 2000, "not YAML text: maximum recursion depth exceeded"),
    ],
    ids=[
        *("unclosed", "eights", "key twice", "template"),
        *("list", "empty"),
        *("tab", "unknown tag", "unknown alias", "Latin-1", "binary"),
        *("no day", "no bool", "no time", "deep"),
    ],
)
def test_broken_yaml(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(text, encoding="latin-1")
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


MODELS = ROOT / "experiments" / "models"
HINT = "correct it"
DENSE = read_json(MODELS / "nano-dense.json")
MOE = read_json(MODELS / "nano-moe.json")

MODEL_ERRORS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no hidden size": (DENSE, {"hidden_size": REMOVED}, "hidden_size: missing"),
    "hidden size 0": (DENSE, {"hidden_size": 0}, "hidden_size: should be greater than or equal"),
    "ten million layers": (DENSE, {"num_hidden_layers": 10**7}, "num_hidden_layers: should be le"),
    "fraction": (DENSE, {"hidden_size": 128.0}, "hidden_size: should be a valid integer"),
    "null": (DENSE, {"intermediate_size": None}, "intermediate_size: missing"),
    "odd head": (DENSE, {"head_dim": 63}, "head_dim: odd; rotary embeddings turn pairs"),
    "no head size": (DENSE, {"head_dim": REMOVED}, "head_dim: missing"),
    "heads": (DENSE, {"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_at"),
    "epsilon": (DENSE, {"rms_norm_eps": 0.0}, "rms_norm_eps: should be greater than 0"),
    "infinite": (DENSE, {"rope_theta": float("inf")}, "rope_theta: should be a finite number"),
    "activation": (DENSE, {"hidden_act": "silly"}, "hidden_act: should be 'silu'"),
    "tied": (DENSE, {"tie_word_embeddings": "no"}, "tie_word_embeddings: should be a valid bool"),
    "architecture": (DENSE, {"model_type": "gpt2"}, "model_type: 'gpt2' is not one of llama, qw"),
    "no experts": (MOE, {"num_experts": REMOVED}, "num_experts: missing"),
    "top-k": (MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than the 8 experts"),
    "no expert size": (MOE, {"moe_intermediate_size": REMOVED}, "moe_intermediate_size: missing"),
}


@pytest.mark.parametrize(
    ("base", "changes", "line"), MODEL_ERRORS.values(), ids=MODEL_ERRORS.keys()
)
def test_error_names_file_and_key(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], line: str
) -> None:
    content = {key: value for key, value in (base | changes).items() if value is not REMOVED}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError) as refused:
        read_model_config(path, HINT)
    assert str(refused.value).startswith(f"{path}: {line}")
    assert str(refused.value).endswith(f"; {HINT}")
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.json")), ids=lambda path: path.stem)
def test_models_of_the_studies_are_valid(path: Path) -> None:
    assert read_model_config(path, HINT) == read_json(path)
