"""The very command lines of the arms, and the settings that each needs.

After a wanted change:
    python -m experiments.verl.command --study FILE --run RUN > tests/unit/verl_commands/RUN.sh
"""

from pathlib import Path

import pytest
import yaml

from experiments.study.arm_recipes import make_recipes
from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES, Run, Study
from experiments.verl.command import build_command, places, run_settings
from qat_core.recipe import Recipe

GOLDEN = Path(__file__).parent / "verl_commands"
QWEN3 = load_study(STUDIES / "qwen3.yaml")
NANO = load_study(STUDIES / "verl_nano.yaml")
RUNS = [(study, run) for study in (QWEN3, NANO) for run in study.runs if run.seed == 0]
QAT = "actor_rollout_ref.actor.fsdp_config.qat"


def settings_of(study: Study, run: Run) -> dict[str, object]:
    where = places(study, run, Path(), Path("results"), Path("attempt"))
    return {key: setting.value for key, setting in run_settings(study, run, where).items()}


@pytest.mark.parametrize(("study", "run"), RUNS, ids=[run.id for _, run in RUNS])
def test_command_is_the_golden_one(study: Study, run: Run) -> None:
    results = Path("results")
    where = places(study, run, Path(), results, results / run.id / "attempts" / "1")
    assert f"{build_command(study, run, where)}\n" == (GOLDEN / f"{run.id}.sh").read_text()


def test_golden_files_are_those_of_the_runs() -> None:
    assert {file.stem for file in GOLDEN.iterdir()} == {run.id for _, run in RUNS}


@pytest.mark.parametrize("run", QWEN3.runs[::3], ids=lambda run: run.id)
def test_arm_trains_and_rolls_out_as_that_of_the_local_trainer(run: Run) -> None:
    settings, recipes = settings_of(QWEN3, run), make_recipes(run.arm)
    assert settings["+nvfp4"] == ("off" if recipes.rollout is None else "w4a16")
    if recipes.rollout is None:
        assert not any(key.startswith(QAT) for key in settings)
        return
    assert settings.get(f"{QAT}.enable", True) == (recipes.train is not None)
    assert settings[f"{QAT}.scale"] == recipes.rollout.scale
    # lm_head, embeddings and gates are never quantized here, and named for vLLM's sake
    patterns = settings.get(f"{QAT}.ignore_patterns", [])
    assert isinstance(patterns, list)
    assert set(recipes.rollout.ignore) == set(patterns) - {
        *("lm_head", "embed_tokens", "re:.*mlp.gate$")
    }


def test_arms_leave_out_what_the_plugin_leaves_out() -> None:
    plugin = yaml.safe_load((ROOT / "qat_core/verl/config/nvfp4/w4a16.yaml").read_text())
    whole = plugin["actor_rollout_ref"]["actor"]["fsdp_config"]["qat"]["ignore_patterns"]
    run = QWEN3.find_run("qwen3-8b_nvfp4-qat-ffn_seed0")
    assert settings_of(QWEN3, run)[f"{QAT}.ignore_patterns"] == [*whole, *Recipe.ffn().ignore]


def test_seed_reaches_data_rollouts_and_trainer() -> None:
    seeds = {
        key: value
        for key, value in settings_of(QWEN3, Run("qwen3-8b", "bf16", 2)).items()
        if key.endswith("seed")
    }
    assert len(seeds) == 4 and set(seeds.values()) == {2}


def test_setting_of_the_study_is_refused_in_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "experiments" / "recipes"
    for folder in ("nano", "arms"):
        (recipe / folder).mkdir(parents=True)
    for name in ("base", "nano/recipe", "arms/nvfp4-qat"):
        (recipe / f"{name}.yaml").write_text("{}")
    (recipe / "nano" / "recipe.yaml").write_text("actor_rollout_ref.rollout: {top_p: 0.9}")
    monkeypatch.setattr("experiments.study.verl_settings.RECIPES", recipe)
    with pytest.raises(
        ValueError,
        match=r"nano/recipe.yaml: actor_rollout_ref.rollout.top_p: comes from the study; remove",
    ):
        settings_of(NANO, NANO.find_run("nano-dense-verl_nvfp4-qat_seed0"))
