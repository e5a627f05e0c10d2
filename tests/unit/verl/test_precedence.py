"""What a file of the user's says is not overridden by `+nvfp4=...` in silence."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.verl_configurations import COMMAND, QAT, ROLLOUT, VERL, started

ACTOR = "actor_rollout_ref.actor"
WORKER = f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls"
MODULE = f"{ROLLOUT}.checkpoint_engine.custom_backend_module"


def written(
    folder: Path, key: str, value: object, *defaults: object, verls: str = f"{VERL}/trainer/config"
) -> Path:
    """The path of `mine.yaml`, without its suffix: verl's configuration with one key of its own."""
    content: object = value
    for name in reversed(key.split(".")):
        content = {name: content}
    assert isinstance(content, dict)
    text = {
        "hydra": {"searchpath": [f"file://{verls}"]},
        "defaults": ["ppo_trainer", *defaults, "_self_"],
        **content,
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(text, sort_keys=False))
    return folder / "mine"


OVERRIDDEN = {
    "enable": (f"{QAT}.enable", False, "w4a16"),
    "worker": (WORKER, "a.B", "w4a16"),
    "strategy in BF16": (f"{ACTOR}.strategy", "fsdp", "off"),
}


@pytest.mark.verl_table(
    "keys of a file that the line would override",
    "refused, with `+nvfp4=off` too",
    cases=["w4a16", "off"],
)
@pytest.mark.parametrize(("key", "value", "choice"), OVERRIDDEN.values(), ids=OVERRIDDEN)
def test_a_key_of_a_file_that_the_line_would_override_is_refused(
    tmp_path: Path, key: str, value: object, choice: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        started(f"+nvfp4={choice}", *COMMAND[1:], config=written(tmp_path, key, value))
    said = str(value).lower() if isinstance(value, bool) else value
    assert ended.value.code == (
        f"error: {key}: {said} in mine.yaml, but +nvfp4={choice} comes after it; "
        f"put {{nvfp4: {choice}}} before _self_ in its defaults instead"
    )


@pytest.mark.parametrize(
    ("key", "value", "group"),
    [
        ("actor_rollout_ref.model.external_lib", "my.module", "attention=sdpa"),
        ("trainer.v1.sampler.custom_sampler.path", "pkg://my.sampler", "sampler=quick"),
    ],
)
def test_other_groups_override_no_file_either(
    tmp_path: Path, key: str, value: str, group: str
) -> None:
    message = rf"{re.escape(key)}: .* in mine\.yaml, but \+{group} comes after it"
    with pytest.raises(SystemExit, match=message):
        started(*COMMAND, f"+{group}", config=written(tmp_path, key, value))


def test_a_key_of_a_file_counts_after_the_group_in_its_defaults(tmp_path: Path) -> None:
    mine = written(tmp_path, f"{QAT}.train", False, {"nvfp4": "w4a16"})
    content = started(*COMMAND[1:], config=mine)
    assert content.actor_rollout_ref.actor.fsdp_config.qat.train is False


def test_what_a_file_says_as_the_group_does_is_accepted(tmp_path: Path) -> None:
    started(*COMMAND, config=written(tmp_path, f"{ACTOR}.strategy", "fsdp2"))


def test_what_a_file_leaves_open_is_accepted(tmp_path: Path) -> None:
    started(*COMMAND, config=written(tmp_path, f"{ACTOR}.strategy", "???"))


def test_a_copy_of_verls_files_is_verls_but_for_what_was_changed(tmp_path: Path) -> None:
    copy = tmp_path / "config"
    shutil.copytree(VERL / "trainer/config", copy)
    started(*COMMAND, config=copy / "ppo_trainer")
    rollout = copy / "rollout/rollout.yaml"
    rollout.write_text(rollout.read_text().replace("load_format: dummy", "load_format: auto"))
    key = rf"{ROLLOUT}\.load_format: auto in rollout/rollout\.yaml, but \+nvfp4=w4a16 comes after"
    with pytest.raises(SystemExit, match=key):
        started(*COMMAND, config=copy / "ppo_trainer")


def test_a_key_of_a_groups_file_belongs_in_the_command(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor/mine.yaml").write_text(
        "defaults: [dp_actor, _self_]\nfsdp_config: {qat: {scale_policy: amax}}\n"
    )
    command = [*COMMAND, "actor@actor_rollout_ref.actor=mine"]
    config = written(tmp_path, f"{ACTOR}.strategy", "fsdp2")
    key = f"{QAT}.scale_policy"
    with pytest.raises(SystemExit) as ended:
        started(*command, config=config)
    assert ended.value.code == (
        f"error: {key}: amax in actor/mine.yaml, but +nvfp4=w4a16 comes after it; "
        f"add {key}=amax to the command"
    )
    content = started(*command, f"{key}=amax", config=config)
    assert content.actor_rollout_ref.actor.fsdp_config.qat.scale_policy == "amax"


def test_the_command_comes_after_file_and_group(tmp_path: Path) -> None:
    mine = written(tmp_path, f"{QAT}.train", False)
    content = started(*COMMAND, f"{QAT}.train=true", config=mine)
    assert content.actor_rollout_ref.actor.fsdp_config.qat.train is True


def test_the_longer_line_is_refused_likewise(tmp_path: Path) -> None:
    mine = written(tmp_path, f"{QAT}.train", False)
    with pytest.raises(SystemExit, match=r"qat\.train: false in mine\.yaml, but \+nvfp4=w4a16"):
        started("+nvfp4@_global_=w4a16", *COMMAND[1:], config=mine)


def test_of_two_choices_none_wins() -> None:
    with pytest.raises(SystemExit, match=r"\+nvfp4: w4a16, off: choose one"):
        started("+nvfp4=[w4a16,off]", *COMMAND[1:])
