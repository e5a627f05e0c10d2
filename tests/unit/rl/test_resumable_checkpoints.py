"""Checkpoints of a run: whole or not there, one of them resumable at the end, damage named."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from experiments.rl import resume
from experiments.rl.optimizer import MasterAdamW
from experiments.rl.tokenizer import character_tokenizer
from tests.files import contents, flip_bit, truncate
from tests.nano_models import write_nano

STEPS = (2, 4)


class Killed(BaseException):
    """As a signal ends a process: no handler of an error sees it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = tmp_path_factory.mktemp("nano") / "model"
    write_nano("nano-dense", folder, num_layers=1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def new_optimizer(model: PreTrainedModel, value: float) -> MasterAdamW:
    """An optimizer whose masters all hold one value."""
    optimizer = MasterAdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    with torch.no_grad():
        for master in optimizer.masters:
            master.fill_(value)
    return optimizer


def save(folder: Path, model: PreTrainedModel, step: int) -> None:
    optimizer = new_optimizer(model, step)
    optimizer.write_back()
    resume.save(folder, step, model, character_tokenizer(), optimizer)


def load(folder: Path, model: PreTrainedModel) -> int:
    """Loads, and checks that what was loaded is the step's."""
    optimizer = new_optimizer(model, -1.0)
    step = resume.load(folder, optimizer)
    assert all((master == (step or -1)).all() for master in optimizer.masters)
    return step


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """The call of that number of a function ends the process, half done if it removes a folder."""
    original, calls = getattr(owner, name), []

    def replaced(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            if name == "rmtree" and args[0].exists():
                next(path for path in args[0].rglob("*") if path.is_file()).unlink()
            raise Killed
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, replaced)


KILL_POINTS = [
    *((shutil, "rmtree", call) for call in range(1, 4)),
    (Path, "rename", 1),
    (Path, "replace", 1),
    (Path, "unlink", 1),
    (torch, "save", 1),
    (resume, "save_file", 1),
    (resume, "write_manifest", 1),
]


@pytest.mark.parametrize(
    ("owner", "name", "call"), KILL_POINTS, ids=[f"{name} {call}" for _, name, call in KILL_POINTS]
)
def test_a_killed_save_leaves_a_whole_checkpoint_and_in_the_end_the_same_files(
    tmp_path: Path, model: PreTrainedModel, owner: Any, name: str, call: int
) -> None:
    for step in STEPS:
        save(tmp_path / "whole", model, step)
    save(tmp_path / "cut", model, STEPS[0])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, owner, name, call)
        save(tmp_path / "cut", model, STEPS[1])
    assert set(resume.find_steps(tmp_path / "cut")) <= set(STEPS)
    step = load(tmp_path / "cut", model)
    assert step in STEPS
    if step == STEPS[0]:
        save(tmp_path / "cut", model, STEPS[1])
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert resumable(tmp_path / "cut") == {f"step_{step}": step == STEPS[1] for step in STEPS}


def resumable(folder: Path) -> dict[str, bool]:
    """The folders of checkpoints, and whether they hold an optimizer's state."""
    return {path.name: (path / "optimizer.pt").exists() for path in folder.iterdir()}


def test_a_model_that_is_kept_without_its_optimizer_is_whole_and_not_resumed(
    tmp_path: Path, model: PreTrainedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in STEPS:
        save(tmp_path, model, step)
    for step in STEPS:
        resume.check(tmp_path / f"step_{step}")
    flip_bit(tmp_path / "step_2" / "model.safetensors")
    assert load(tmp_path, model) == STEPS[1]
    with pytest.raises(ValueError, match=r"step_2/model.safetensors: SHA-256 differs"):
        resume.check(tmp_path / "step_2")
    (tmp_path / "step_4" / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match=r"step_4/optimizer.pt: listed in SHA256SUMS but missing"):
        load(tmp_path, model)
    assert capsys.readouterr().out == ""


DAMAGES = {"truncated": truncate, "flipped bit": flip_bit, "missing": Path.unlink}
FILES = ("optimizer.pt", "model.safetensors", "config.json", "tokenizer.json", "SHA256SUMS")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_named(
    tmp_path: Path, model: PreTrainedModel, damage: Callable[[Path], None], file: str
) -> None:
    save(tmp_path, model, 2)
    damage(tmp_path / "step_2" / file)
    with pytest.raises(ValueError) as refused:
        load(tmp_path, model)
    (line,) = str(refused.value).splitlines()
    # a damaged list of digests accuses the file whose digest it has wrong
    assert line.startswith(f"{tmp_path}/step_2/")
    assert file in line or file == "SHA256SUMS"
    assert line.endswith(f"restore it, or delete {tmp_path} to train from the first step")


def test_the_newest_whole_checkpoint_is_taken_and_said_so(
    tmp_path: Path, model: PreTrainedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, model, 2)
    shutil.copytree(tmp_path / "step_2", tmp_path / "kept")
    save(tmp_path, model, 4)
    shutil.rmtree(tmp_path / "step_2")
    (tmp_path / "kept").rename(tmp_path / "step_2")
    truncate(tmp_path / "step_4" / "optimizer.pt")
    assert load(tmp_path, model) == 2
    said = capsys.readouterr().out
    assert f"warning: {tmp_path}/step_4/optimizer.pt: SHA-256 differs" in said
    assert said.endswith("; resuming from step 2 instead\n")
    assert list(resume.find_steps(tmp_path)) == [2]


@pytest.mark.parametrize(
    "state",
    [{}, {"masters": [], "adamw": {}}, {"masters": [torch.zeros(1)] * 100, "adamw": {}}, [1]],
    ids=["no keys", "no masters", "other shapes", "not a mapping"],
)
def test_another_models_state_is_named(
    tmp_path: Path, model: PreTrainedModel, state: object
) -> None:
    save(tmp_path, model, 2)
    path = tmp_path / "step_2" / "optimizer.pt"
    torch.save(state, path)
    (tmp_path / "step_2" / "SHA256SUMS").unlink()
    resume.write_manifest(tmp_path / "step_2")
    with pytest.raises(ValueError, match=r"optimizer.pt: not the state of this run's optimizer"):
        load(tmp_path, model)


def test_persistent_buffers_are_saved(tmp_path: Path, model: PreTrainedModel) -> None:
    """As a router's score correction, which the model needs and no optimizer holds."""
    model.register_buffer("bias", torch.arange(3.0))
    save(tmp_path, model, 2)
    del model.bias
    assert load_file(tmp_path / "step_2" / "model.safetensors")["bias"].equal(torch.arange(3.0))


@pytest.mark.parametrize("name", ["step_2.bak", "step_", "step_x", "old_step_9", "step_-1"])
def test_folders_of_other_names_do_not_count(
    tmp_path: Path, model: PreTrainedModel, name: str
) -> None:
    save(tmp_path, model, 2)
    (tmp_path / name).mkdir()
    assert load(tmp_path, model) == 2


def test_a_full_disk_is_one_line_and_leaves_nothing_partial(
    tmp_path: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, model, 2)

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(ValueError, match=r"step 4 not written \(.*No space.*\); free disk space$"):
        save(tmp_path, model, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
