"""What verl is given for the runs of a study: one in full, the others by what differs; and key by
key for the published setting.

After a wanted change:
    python -m experiments.verl.command --study FILE --run RUN > tests/unit/verl/settings/RUN.txt
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES, Run, Study
from experiments.verl.command import (
    build_command,
    build_configuration,
    is_group,
    run_paths,
    run_settings,
    to_yaml,
)
from qat_core.planning.recipe import Recipe
from tests.workflow.programs import module

FOLDER = Path(__file__).parent / "settings"
QWEN3 = load_study(STUDIES / "qwen3.yaml")
NANO = load_study(STUDIES / "verl_nano.yaml")
RUNS = [(study, run) for study in (QWEN3, NANO) for run in study.runs if run.seed == 0]
IN_FULL = QWEN3.runs[0]
DIFFERENCES = yaml.safe_load((FOLDER / "differences.yaml").read_text())
SEED = "actor_rollout_ref.rollout.seed"
QAT = "actor_rollout_ref.actor.fsdp_config.qat"


def settings_of(study: Study, run: Run) -> dict[str, Any]:
    """By key, and the environment."""
    paths = run_paths(study, run, Path(), Path("results"), Path("attempt"))
    settings = {key: setting.value for key, setting in run_settings(study, run, paths).items()}
    return settings | build_command(study, run, paths).environment


def renamed(settings: dict[str, Any], old: Run, new: Run) -> dict[str, Any]:
    """The settings under another run's and model's name, groups without their "+"."""

    def rename(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return value.replace(old.id, new.id).replace(f"base/{old.model}", f"base/{new.model}")

    keys = {key: key.removeprefix("+") if is_group(key) else key for key in settings}
    return {keys[key]: rename(value) for key, value in settings.items()}


def test_one_run_is_set_in_full_as_in_its_file() -> None:
    """As `python -m experiments.verl.command` prints it."""
    attempt = Path("results") / IN_FULL.id / "attempts" / "1"
    paths = run_paths(QWEN3, IN_FULL, Path(), Path("results"), attempt)
    text = to_yaml(build_configuration(QWEN3, IN_FULL, paths))
    printed = f"# {attempt}/verl.yaml\n{text}\n{build_command(QWEN3, IN_FULL, paths)}\n"
    assert printed == (FOLDER / f"{IN_FULL.id}.txt").read_text()


@pytest.mark.parametrize(("study", "run"), RUNS, ids=[run.id for _, run in RUNS])
def test_the_others_differ_as_listed(study: Study, run: Run) -> None:
    expected = renamed(settings_of(QWEN3, IN_FULL), IN_FULL, run) | DIFFERENCES.get(run.id, {})
    assert renamed(settings_of(study, run), run, run) == expected


def test_every_run_is_in_full_or_listed() -> None:
    assert {IN_FULL.id, *DIFFERENCES} == {run.id for _, run in RUNS}


def test_the_ffn_arm_leaves_out_attention_besides_verls_own_patterns() -> None:
    config = pytest.importorskip("verl.workers.config", reason="needs verl")
    run = QWEN3.find_run("qwen3-8b_nvfp4-qat-ffn_seed0")
    own = config.QATEngineConfig().ignore_patterns
    assert settings_of(QWEN3, run)[f"{QAT}.ignore_patterns"] == [*own, *Recipe.ffn().ignore]


def test_seed_reaches_data_rollouts_and_trainer() -> None:
    first, second = (
        {
            key: value
            for key, value in settings_of(QWEN3, Run("qwen3-8b", "bf16", seed)).items()
            if key.endswith("seed")
        }
        for seed in (2, 3)
    )
    of_engines = second.pop(SEED) - first.pop(SEED)
    assert of_engines > QWEN3.gpus, "verl counts engines from there"
    assert len(first) == 3 and set(first.values()) == {2}


def test_a_checkpoint_that_would_come_after_the_last_step_never_comes() -> None:
    rl = NANO.rl
    for save_every, expected in ((rl.steps, rl.steps), (rl.steps + 1, -1)):
        study = NANO.model_copy(update={"rl": rl.model_copy(update={"save_every": save_every})})
        assert settings_of(study, study.runs[0])["trainer.save_freq"] == expected


@pytest.mark.verl_table(
    "`trainer.nnodes` in a recipe of the harness",
    "refused: it starts a Ray of its own machine",
    cases=["trainer.nnodes"],
)
@pytest.mark.parametrize(
    "key", ["actor_rollout_ref.rollout.top_p", "trainer.nnodes"], ids=["sampling", "several nodes"]
)
def test_setting_of_the_study_is_refused_in_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    recipe = tmp_path / "experiments" / "recipes"
    (recipe / "nano").mkdir(parents=True)
    (recipe / "base.yaml").write_text("{}")
    (recipe / "nano" / "recipe.yaml").write_text(f"{key}: 2")
    monkeypatch.setattr("experiments.study.verl_settings.RECIPES", recipe)
    with pytest.raises(ValueError, match=f"nano/recipe.yaml: {key}: comes from the study; remove"):
        settings_of(NANO, NANO.find_run("nano-dense-verl_nvfp4-qat_seed0"))


def test_the_file_can_be_written_for_a_command_of_ones_own(tmp_path: Path) -> None:
    study, run = STUDIES / "verl_nano.yaml", "nano-dense-verl_bf16_seed0"
    arguments = ("--study", study, "--run", run, "--results", tmp_path, "--write")
    done = module("experiments.verl.command", *arguments)
    assert done.returncode == 0, done.stderr
    attempt = tmp_path / run / "attempts" / "1"
    written = yaml.safe_load((attempt / "verl.yaml").read_text())
    assert written["defaults"][0] == "ppo_trainer"
    assert done.stdout.rstrip().endswith(f"--config-dir {attempt} --config-name verl")
    assert "defaults" not in done.stdout


def test_a_study_without_correction_and_centring_is_set_in_verl() -> None:
    study = load_study(STUDIES / "collapse_verl.yaml")
    settings = settings_of(study, study.runs[0])
    assert settings["algorithm.adv_estimator"] == "reward"
    assert settings["algorithm.rollout_correction.rollout_is"] is None
    assert settings["VERL_USE_EXTERNAL_MODULES"] == "qat_core.verl.advantage"


def test_a_cell_is_set_in_verl() -> None:
    study = load_study(STUDIES / "collapse_smollm2_verl.yaml")
    corrections = {
        run.cell: settings_of(study, run)["algorithm.rollout_correction.rollout_is"]
        for run in study.runs
    }
    assert corrections == {"lr3e-5": None, "lr3e-5-tis": "token", "lr3e-5-bf16": None}


PUBLISHED = FOLDER / "published.yaml"
README = ROOT / "experiments" / "recipes" / "README.md"
# what experiments/recipes/README.md explains, by the words of its table
DIFFERENT = {
    "actor_rollout_ref.actor.strategy": ("fsdp2", "FSDP1 (`strategy: fsdp`, verl's default)"),
    "data.gen_batch_size": (None, "`gen_batch_size: 64`"),
    "actor_rollout_ref.rollout.val_kwargs.n": (32, "AIME 2024, each problem 32 times, `n=1`"),
    "trainer.total_epochs": (1000, "one epoch"),
    "trainer.logger": (["console", "file"], "`wandb`"),
}


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What verl is given for the run that the script describes."""
    pytest.importorskip("verl", reason="needs requirements/engines.txt")
    from hydra import compose, initialize_config_dir

    study = load_study(STUDIES / "qwen3_published.yaml")
    run = study.find_run("qwen3-30b-a3b-published_nvfp4-qat_seed0")
    folder = tmp_path_factory.mktemp("published")
    paths = run_paths(study, run, ROOT, folder, folder)
    (folder / "verl.yaml").write_text(to_yaml(build_configuration(study, run, paths)))
    with initialize_config_dir(str(folder), version_base=None):
        return compose("verl", overrides=["hydra.searchpath=[pkg://verl.trainer.config]"])


@pytest.mark.parametrize(("key", "published"), yaml.safe_load(PUBLISHED.read_text()).items())
def test_a_published_value_is_set_or_its_difference_explained(
    composed: Any, key: str, published: Any
) -> None:
    from omegaconf import OmegaConf

    value = OmegaConf.select(composed, key)
    found = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    if key not in DIFFERENT:
        assert found == published
        return
    here, explained = DIFFERENT[key]
    assert found == here != published
    assert f"| {explained} |" in README.read_text()


def test_the_published_scale_and_reward_are_set(composed: Any) -> None:
    assert composed.actor_rollout_ref.actor.fsdp_config.qat.scale_policy == "amax"
    assert composed.reward.custom_reward_function.reward_kwargs.rule == "math_dapo"
