"""The published setting: every key of its script has its value, but for the differences named."""

from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES
from experiments.verl.command import build_configuration, run_paths, to_yaml

SETTINGS = Path(__file__).parent / "settings" / "published.yaml"
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
    study = load_study(STUDIES / "qwen3_published.yaml")
    run = study.find_run("qwen3-30b-a3b-published_nvfp4-qat_seed0")
    folder = tmp_path_factory.mktemp("published")
    paths = run_paths(study, run, ROOT, folder, folder)
    (folder / "verl.yaml").write_text(to_yaml(build_configuration(study, run, paths)))
    with initialize_config_dir(str(folder), version_base=None):
        return compose("verl", overrides=["hydra.searchpath=[pkg://verl.trainer.config]"])


@pytest.mark.parametrize(("key", "published"), yaml.safe_load(SETTINGS.read_text()).items())
def test_a_published_value_is_set_or_its_difference_explained(
    composed: Any, key: str, published: Any
) -> None:
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
