"""Keys that verl does not know are refused with their file, before anything starts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("hydra", reason="needs requirements/engines.txt")
pytest.importorskip("verl", reason="needs requirements/engines.txt")

from omegaconf import OmegaConf

from experiments.study.load import load_study
from experiments.study.schema import STUDIES
from experiments.study.verl_settings import Setting, known_variants
from experiments.verl.command import to_tree, to_yaml
from experiments.verl.known_keys import require_known
from experiments.verl.preflight import require_known_settings

# what YAML 1.1, Hydra's override grammar or a number in disguise could turn into something else
TRICKY = ["off", "1e-6", "null", "a=b,c", "it's", "[x]", "\\d+", "~", "08", "", "1.5E+3", "-2e4"]


@given(
    st.dictionaries(st.sampled_from(["a.b", "a.+c", "d"]), st.sampled_from([*TRICKY, 1e-06, None]))
)
def test_hydra_reads_back_what_is_written(settings: dict[str, Any]) -> None:
    tree = to_tree(settings)
    assert OmegaConf.to_container(OmegaConf.create(to_yaml(tree)), resolve=True) == tree


def test_key_with_a_plus_is_added_without_it() -> None:
    assert to_tree({"a.+b.c": 1, "a.d": 2}) == {"a": {"b": {"c": 1}, "d": 2}}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_smoke", "verl_nano"])
def test_verl_knows_all_that_the_arms_of_a_study_set(name: str) -> None:
    study = load_study(STUDIES / f"{name}.yaml")
    require_known_settings(study, study.runs)


@pytest.mark.parametrize("variant", known_variants())
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_verl_knows_all_that_a_variant_sets(variant: str, device: str) -> None:
    study = load_study(STUDIES / "qwen3.yaml")
    changed = study.model_copy(update={"variant": (variant,), "device": device})
    require_known_settings(changed, changed.runs[:1])


UNKNOWN = {
    "typo": ("data.max_promt_length", "unknown to verl; did you mean max_prompt_length?"),
    "typo of a section": ("actr_rollout_ref.actor.strategy", "unknown to verl; did you mean actor"),
    "no near one": ("reward.zzz.yyy", "unknown to verl; it has _target_, num_workers, "),
    "below a value": ("data.seed.x", "unknown to verl; it has nothing here"),
    "in an empty section": ("actor_rollout_ref.model.override_config.x", "unknown to verl; it has"),
    "plus before a listed one": ("data.+seed", "verl lists seed; remove the +"),
    "plus below an unknown section": ("dta.+seed", "unknown to verl; did you mean data?"),
    "unknown choice": ("+nvfp4", "1: no such choice; use +"),
    "unknown group": ("+nvfp5", "1: no such choice; use +"),
}


@pytest.mark.parametrize(("key", "line"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_unknown_key_names_file_and_fix(key: str, line: str) -> None:
    with pytest.raises(ValueError) as caught:
        require_known({key: Setting(1, "recipes/x.yaml")})
    assert str(caught.value).startswith(f"recipes/x.yaml: {key}: {line}")


def test_value_that_hydra_does_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match=r"verl's configuration: .*correct the recipe"):
        require_known({"data.seed": Setting("${", "recipes/x.yaml")})


def test_what_the_plugin_refuses_is_refused_before_a_run_starts() -> None:
    settings = {"+nvfp4": "w4a16", "actor_rollout_ref.rollout.name": "sglang"}
    with pytest.raises(ValueError, match=r"rollout\.name: sglang: .*; correct the recipe"):
        require_known({key: Setting(value, "recipes/x.yaml") for key, value in settings.items()})
