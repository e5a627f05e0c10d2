"""Names of this project where nothing reads them, in a verl command: it would train in BF16.

Hydra composes `+nvfp4@_global=w4a16` into a section `_global`, and takes `+nvpf4=w4a16` for a key
of the user's own. Only the composed configuration shows what came of a command and its files, and
Hydra's callbacks see it: `watch`, called where a program has imported verl, adds one. It goes by
the name `nvfp4`, so that this project's files replace it by `CompleteConfiguration`.
"""

import re
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from qat_core.verl.precedence import GROUPS, as_default, entries_in_order
from qat_core.verl.rules import OWN_KEYS, QAT, refusal

CLOSE = 0.8  # of difflib's ratio: two letters exchanged in `nvfp4` have just that
OURS = ("nvfp4", "w4a16")
# that this project's files set
SECTIONS = ("hydra", "actor_rollout_ref", "trainer", "ray_kwargs", "exact")
EXACT_NAMES = ("exact", "exact_mode")
USE_EXACT = 'use +exact=on, in a file\'s defaults exact: "on"; leave it out for no exact mode'


class RefuseNearMisses(Callback):  # type: ignore[misc]
    """Of a command that chooses no file of the group `nvfp4`."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Ends the program with a line for each."""
        try:
            require_read(config)
        except ValueError as error:
            sys.exit(refusal(error))

    on_multirun_start = on_run_start


def watch() -> None:
    """Adds the callback to Hydra's defaults."""
    store = ConfigStore.instance()
    defaults = store.load("hydra/config.yaml").node
    defaults.callbacks["nvfp4"] = {"_target_": f"{__name__}.{RefuseNearMisses.__name__}"}
    store.store(group="hydra", name="config", node=defaults, provider="hydra")


def require_read(config: DictConfig) -> None:
    """ValueError with a line for each name of this project's that nothing reads.

    Args:
        config: composed, with Hydra's own section.
    """
    paths = [(str(it.config_path), str(it.package)) for it in entries_in_order(config.hydra)[1]]
    chosen = [
        (*path.split("/"), package) for path, package in paths if path.split("/")[0] in GROUPS
    ]
    misplaced = [each for each in chosen if each[-1]]
    content = OmegaConf.to_container(config, resolve=False)
    assert isinstance(content, dict)
    del content["hydra"]
    seen = {f"{package}.{top}" for *_, package in misplaced for top in SECTIONS}
    seen |= {package for group, _, package in misplaced if package == group}
    if ("exact", "on", "") in chosen and content.get("exact") is True:
        seen.add("exact")
    found = [
        *(_misplaced(*each) for each in misplaced),
        *_empty_choices(config.hydra.overrides.task),
        *_plain_keys(content, "", seen),
    ]
    if "nvfp4" not in {group for group, *_ in chosen}:
        keys = (f"{QAT}.{key}" for key in OWN_KEYS)
        given = [key for key in keys if OmegaConf.select(config, key) is not None]
        found += [f"{key}: only +nvfp4=w4a16 reads it; give that, or remove it" for key in given]
    if found:
        raise ValueError("\n".join(found))


def _misplaced(group: str, choice: str, package: str) -> str:
    return (
        f"{group}@{package}: {choice}: would be composed below {package}, where nothing reads it; "
        f"write +{group}@_global_={choice}, in a file's defaults {as_default(group, choice)}"
    )


def _empty_choices(overrides: Any) -> Iterator[str]:
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.key_or_group in GROUPS and override.value() == []:
            choices = " or ".join(GROUPS[override.key_or_group])
            yield f"{override.input_line}: chooses nothing; give {choices}, or leave it out"


def _plain_keys(section: dict[Any, Any], prefix: str, seen: set[str]) -> Iterator[str]:
    for name, value in section.items():
        key = f"{prefix}{name}"
        if key in seen:
            continue
        is_section = isinstance(value, dict)
        said = key if is_section else f"{key}: {_text(value)}"
        group = _meant(str(name), _text(value))
        if not prefix and is_section and name in GROUPS:
            group = str(name)
        if not prefix and _text(value) in OURS:  # below, it may name an experiment
            group = "nvfp4"
        if name in EXACT_NAMES and prefix.partition(".")[0] in ("", *SECTIONS):
            yield f"{said}: nothing reads it; {USE_EXACT}"
        elif group:
            choices = [it for it in GROUPS[group] if it == _text(value)] or GROUPS[group]
            right = f"+{group}@_global_={' or '.join(choices)}"
            lines = " or ".join(as_default(group, it) for it in choices)
            yield f"{said}: nothing reads it; write {right}, in a file's defaults {lines}"
        elif is_section:
            yield from _plain_keys(value, f"{key}.", seen)
        elif _is_own(str(name), prefix) and key != f"{QAT}.{name}":
            yield f"{said}: nothing reads it there; set {QAT}.{name}"


def _text(value: Any) -> str:
    return "off" if value is False else str(value).lower()  # as YAML reads `off`


def _meant(name: str, value: str) -> str:
    """The group that a plain key is meant to choose a file of, "" if none is."""
    words = re.split("[^a-z0-9]+", name.lower())
    if any(own in name.lower() for own in OURS) or any(_close(word, OURS) for word in words):
        return "nvfp4"
    (group,) = _close(name.lower(), tuple(GROUPS)) or ("",)
    return group if group and value in GROUPS[group] else ""


def _close(word: str, names: tuple[str, ...]) -> list[str]:
    return get_close_matches(word, names, 1, CLOSE)


def _is_own(name: str, prefix: str) -> bool:
    """`train` is a common word, but not in a section of QAT."""
    return name in OWN_KEYS and (name != "train" or prefix.endswith("qat."))
