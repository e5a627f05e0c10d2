"""Files and names of a user's: none is overridden in silence, no near miss is let through."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from experiments.study.schema import ROOT
from tests.verl_configurations import COMMAND, CONFIGS, MICRO_BATCH, QAT, ROLLOUT, VERL, started

ACTOR = "actor_rollout_ref.actor"
WORKER = f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls"


def written(folder: Path, key: str, value: object, *defaults: object) -> Path:
    """The path of `mine.yaml`, without its suffix: verl's configuration with one key of its own."""
    content: object = value
    for name in reversed(key.split(".")):
        content = {name: content}
    assert isinstance(content, dict)
    text = {
        "hydra": {"searchpath": [f"file://{VERL}/trainer/config"]},
        "defaults": ["ppo_trainer", *defaults, "_self_"],
        **content,
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(text, sort_keys=False))
    return folder / "mine"


OVERRIDDEN = {
    "enable": (f"{QAT}.enable", False, "nvfp4", "w4a16"),
    "the longer line": (f"{QAT}.train", False, "nvfp4@_global_", "w4a16"),
    "worker": (WORKER, "a.B", "nvfp4", "w4a16"),
    "strategy in BF16": (f"{ACTOR}.strategy", "fsdp", "nvfp4", "off"),
    "module": ("actor_rollout_ref.model.external_lib", "my.module", "attention", "sdpa"),
    "ranks": (f"{ROLLOUT}.tensor_model_parallel_size", 2, "exact", "on"),
    "sampler": ("trainer.v1.sampler.custom_sampler.path", "pkg://my.sampler", "sampler", "quick"),
}


@pytest.mark.verl_table(
    "keys of a file that the line would override",
    "refused, with `+nvfp4=off` too",
    cases=["w4a16", "off"],
)
@pytest.mark.parametrize(("key", "value", "group", "choice"), OVERRIDDEN.values(), ids=OVERRIDDEN)
def test_a_key_of_a_file_that_the_line_would_override_is_refused(
    tmp_path: Path, key: str, value: object, group: str, choice: str
) -> None:
    others, name = COMMAND[1 if "nvfp4" in group else 0 :], group.partition("@")[0]
    with pytest.raises(SystemExit) as ended:
        started(f"+{group}={choice}", *others, config=written(tmp_path, key, value))
    said = str(value).lower() if isinstance(value, bool) else value
    line = f'{name}: "{choice}"' if choice in ("on", "off") else f"{name}: {choice}"
    assert ended.value.code == (
        f"error: {key}: {said} in mine.yaml, but +{name}={choice} comes after it; "
        f"put {{{line}}} before _self_ in its defaults instead"
    )


@pytest.mark.parametrize(
    ("defaults", "command", "trains"),
    [([{"nvfp4": "w4a16"}], COMMAND[1:], False), ([], [*COMMAND, f"{QAT}.train=true"], True)],
    ids=["after the group in its defaults", "before the command"],
)
def test_a_key_of_a_file_counts_by_its_place(
    tmp_path: Path, defaults: list[object], command: list[str], trains: bool
) -> None:
    content = started(*command, config=written(tmp_path, f"{QAT}.train", False, *defaults))
    assert content.actor_rollout_ref.actor.fsdp_config.qat.train is trains


@pytest.mark.parametrize("strategy", ["fsdp2", "???"], ids=["as the group", "left open"])
def test_what_a_file_says_as_the_group_does_or_leaves_open_is_accepted(
    tmp_path: Path, strategy: str
) -> None:
    started(*COMMAND, config=written(tmp_path, f"{ACTOR}.strategy", strategy))


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


def test_of_two_choices_none_wins() -> None:
    with pytest.raises(SystemExit, match=r"\+nvfp4: w4a16, off: choose one"):
        started("+nvfp4=[w4a16,off]", *COMMAND[1:])


USE_EXACT = (
    'nothing reads it; use \\+exact=on, in a file\'s defaults exact: "on"; leave it out for no'
)
RIGHT = r"nothing reads it; write \+nvfp4@_global_="
NEAR_MISSES = {
    "package": (
        "+nvfp4@_global=w4a16",
        r"nvfp4@_global: w4a16: would be composed below _global, where " + RIGHT + "w4a16",
    ),
    "package of verl's": ("+nvfp4@actor_rollout_ref=off", r"nvfp4@actor_rollout_ref: off: would"),
    "package of another group": ("+platform@_global=cpu", r"write \+platform@_global_=cpu"),
    "package of the exact mode": (
        "+exact@_global=on",
        r'write \+exact@_global_=on, in a file\'s defaults exact: "on"',
    ),
    "package of verl's with the exact mode": ("+exact@actor_rollout_ref=on", "exact@actor_rollout"),
    **{
        override: (override, rf"exact(_mode)?: {override.partition('=')[2]}: {USE_EXACT}")
        for override in (
            *("+exact_mode=on", "+actor_rollout_ref.exact=true", f"++{ROLLOUT}.exact=on"),
            f"+{ACTOR}.exact=yes",
        )
    },
    "letters": ("+nvpf4=w4a16", f"nvpf4: w4a16: {RIGHT}w4a16"),
    "a group of any name": ("+fp4=w4a16", f"fp4: w4a16: {RIGHT}w4a16"),
    "capitals": ("+NVFP4=W4A16", f"NVFP4: w4a16: {RIGHT}w4a16"),
    "letters of another group": ("+routing_reply=r3", r"write \+routing_replay@_global_=r3"),
    "below a section": ("+actor_rollout_ref.nvfp4=w4a16", rf"actor_rollout_ref\.nvfp4: .*{RIGHT}"),
    "path": ("+actor_rollout_ref/nvfp4=w4a16", rf"actor_rollout_ref/nvfp4: w4a16: {RIGHT}w4a16"),
    "section": ("+nvfp4.ignore_patterns=[lm_head]", f"nvfp4: {RIGHT}off or w4a16"),
    "section of another group": (
        "+routing_replay.mode=R3",
        r"routing_replay: nothing reads it; write \+routing_replay@_global_=r3",
    ),
    "nothing chosen": ("+nvfp4=[]", r"\+nvfp4=\[\]: chooses nothing; give off or w4a16"),
    "key without a group": (f"+{QAT}.scale_policy=amax", r"scale_policy: only \+nvfp4=w4a16 reads"),
    "key elsewhere": (
        "+critic.scale_policy=amax",
        rf"critic\.scale_policy: amax: nothing reads it there; set {QAT}\.scale_policy",
    ),
}


@pytest.mark.verl_table(
    "this project's names in a wrong package, group, section or spelling (`+nvfp4@_global=w4a16`)",
    "refused, with `+nvfp4=off` too; else the run would be in BF16",
    cases=["package", "letters", "below a section", "key elsewhere"],
)
@pytest.mark.parametrize("case", NEAR_MISSES)
def test_a_near_miss_is_refused(case: str) -> None:
    override, line = NEAR_MISSES[case]
    with pytest.raises(SystemExit, match=rf"\Aerror: .*{line}[^\n]*\Z"):
        started(override, MICRO_BATCH)


@pytest.mark.parametrize(
    ("key", "value", "defaults", "line"),
    [
        ("trainer.device", "cpu", [{"nvfp4@_global": "w4a16"}], "nvfp4@_global: w4a16: would be"),
        ("nvfp4", "w4a16", [], f"nvfp4: w4a16: {RIGHT}w4a16, in a file's defaults nvfp4: w4a16"),
        ("nvfp4", False, [], f'nvfp4: off: {RIGHT}off, in a file\'s defaults nvfp4: "off"'),
        ("exact", True, [], f"exact: true: {USE_EXACT}"),  # YAML's on
        ("exact", False, [{"nvfp4": "off"}, {"exact": "on"}], f"exact: off: {USE_EXACT}"),
    ],
)
def test_a_near_miss_of_a_file_is_refused(
    tmp_path: Path, key: str, value: object, defaults: list[object], line: str
) -> None:
    with pytest.raises(SystemExit, match=rf"\Aerror: {line}[^\n]*\Z"):
        started(*COMMAND[1:], config=written(tmp_path, key, value, *defaults))


def test_a_near_miss_beside_the_right_line_is_refused_with_all_else() -> None:
    with pytest.raises(SystemExit) as ended:
        started(
            *COMMAND,
            "+routing_replay@_global=r3",
            "+nvfp4.train=false",
            f"+{QAT}.scale=amax",
            f"{QAT}.mode=w4a4",
            f"{QAT}.group_size=32",
            "actor_rollout_ref.actor.qat.ignore_patterns=[mlp]",
            "+actor_rollout_ref.rollout.qat.ignore_patterns=[mlp]",
            "actor_rollout_ref.rollout.dtype=float16",
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.enable_eplb=true",
        )
    refused = [line.removeprefix("error: ").split(": ")[0] for line in ended.value.code.split("\n")]
    assert refused == [
        "routing_replay@_global",
        "nvfp4",
        "actor_rollout_ref.rollout.dtype",
        f"{QAT}.scale",
        "actor_rollout_ref.actor.qat.ignore_patterns",
        "actor_rollout_ref.rollout.qat.ignore_patterns",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.enable_eplb",
        f"{QAT}.group_size",
        f"{QAT}.mode",
    ]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_command_without_our_names_is_left_alone(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [
        "trainer.experiment_name=nvfp4-w4a16",
        "+reward.exact=true",
        f"{QAT}.mode=w4a16",
        MICRO_BATCH,
    ]
    content = started(*given, config=config)
    assert "qat_core" not in str({k: v for k, v in content.items() if k != "hydra"})
    assert capfd.readouterr() == ("", "")


def test_programs_that_are_not_verls_are_left_alone() -> None:
    program = """
import sys
from hydra import compose, initialize
with initialize(version_base=None):
    found = compose(overrides=["+nvpf4=w4a16"], return_hydra_config=True)
print(found.nvpf4, found.hydra.callbacks, "qat_core.verl.near_misses" in sys.modules)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "w4a16 {} False\n"
