"""The recipe of a verl run: YAML files of verl's own keys, merged from the general to the special.

A key that verl reads but does not list in its configuration carries Hydra's "+" where it is new:
`reward.+reward_kwargs.max_resp_len`. Nothing here imports verl: a study is planned without it.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from experiments.study.yaml_file import read_yaml
from experiments.support.json_files import flatten

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
_read = cache(read_yaml)  # the runs of a study share their recipes


class Setting(NamedTuple):
    """One value, and the file or the section of the study that it comes from."""

    value: Any
    source: str


def load_recipe(recipe: str, variants: Sequence[str]) -> dict[str, Setting]:
    """Settings by dotted key; lists and scalars are replaced as a whole."""
    files = [RECIPES / "base.yaml", RECIPES / recipe / "recipe.yaml"]
    files += [RECIPES / "variants" / f"{variant}.yaml" for variant in variants]
    return {
        key: Setting(value, str(file.relative_to(RECIPES.parents[1])))
        for file in files
        for key, value in flatten(_read(file)).items()
    }


def known_recipes() -> list[str]:
    """What a model's `recipe` may name."""
    return sorted(file.parent.name for file in RECIPES.glob("*/recipe.yaml"))


def known_variants() -> list[str]:
    """What a study's `variant` may name."""
    return sorted(file.stem for file in (RECIPES / "variants").glob("*.yaml"))
