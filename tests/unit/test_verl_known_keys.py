"""Keys that verl does not know are refused with their file, before anything starts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("hydra", reason="needs requirements/engines.txt")
pytest.importorskip("verl", reason="needs requirements/engines.txt")

from hydra.core.override_parser.overrides_parser import OverridesParser

from experiments.study.load import load_study
from experiments.study.schema import STUDIES
from experiments.study.verl_settings import Setting, known_variants
from experiments.verl.known_keys import require_known
from experiments.verl.overrides import to_override
from experiments.verl.preflight import require_known_settings

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    # not "${", which is to be resolved
    st.text(st.characters(codec="ascii", exclude_characters="$", exclude_categories=["Cc"])),
)


@given(st.one_of(SCALARS, st.lists(SCALARS, max_size=3)))
def test_hydra_reads_back_what_is_written(value: Any) -> None:
    (override,) = OverridesParser.create().parse_overrides([to_override("a.b", value)])
    assert override.value() == value


def test_key_with_a_plus_is_added() -> None:
    (override,) = OverridesParser.create().parse_overrides([to_override("a.+b.c", 1)])
    assert override.is_add() and override.key_or_group == "a.b.c"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_smoke", "verl_nano"])
def test_verl_knows_all_that_the_arms_of_a_study_set(name: str) -> None:
    study = load_study(STUDIES / f"{name}.yaml")
    require_known_settings(study, study.runs)


@pytest.mark.parametrize("variant", known_variants())
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_verl_knows_all_that_a_variant_sets(variant: str, device: str) -> None:
    study = load_study(STUDIES / "qwen3.yaml")
    changed = study.model_copy(update={"variant": variant, "device": device})
    require_known_settings(changed, changed.runs[:1])


MISTAKES = {
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


@pytest.mark.parametrize(("key", "line"), MISTAKES.values(), ids=MISTAKES.keys())
def test_unknown_key_names_file_and_mend(key: str, line: str) -> None:
    with pytest.raises(ValueError) as caught:
        require_known({key: Setting(1, "recipes/x.yaml")})
    assert str(caught.value).startswith(f"recipes/x.yaml: {key}: {line}")


def test_value_that_hydra_does_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match=r"verl's configuration: .*mend the recipe"):
        require_known({"data.seed": Setting("${", "recipes/x.yaml")})
