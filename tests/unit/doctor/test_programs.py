"""The doctor's commands: exit codes, JSON, and one line for each mistake."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import qat_core.doctor.program as doctor
from qat_core import convert
from qat_core.doctor.__main__ import main
from qat_core.doctor.diagnosis import Diagnosis
from qat_core.doctor.examine import Case, examine
from qat_core.planning.recipe import Recipe
from tests.files import set_keys
from tests.nano_models import write_nano

SMALL = ["--sequences", "6", "--max-new-tokens", "6"]


Capture = pytest.CaptureFixture[str]


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments), *SMALL])
    return int(ended.value.code or 0)


def test_a_healthy_checkpoint_ends_with_0_and_json(nano_dir: Path, capsys: Capture) -> None:
    assert run(nano_dir, "--recipe", "full", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] and found["named"] == []
    assert found["num_sequences"] == 6 and found["total"]["value"] >= 0


def test_json_is_alone_on_stdout_whatever_an_engine_logs(
    nano_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    def examine_loudly(case: Case) -> Diagnosis:
        os.write(1, b"INFO of an engine\n")
        return examine(case)

    monkeypatch.setattr(doctor, "examine", examine_loudly)
    assert run(nano_dir, "--json") == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["healthy"] and "INFO of an engine" in err


def test_a_fault_ends_with_1_and_names_weights(nano_dir: Path, capsys: Capture) -> None:
    assert run(nano_dir, "--recipe", "full", "--trained", "none", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["named"] == ["quantization"]
    (fault,) = [f for f in found["findings"] if f["verdict"] == "fault"]
    assert "model.layers.0.self_attn.q_proj.weight" in fault["evidence"]


def test_a_packed_checkpoint_served_is_what_would_be_sent(packed_dir: Path, nano_dir: Path) -> None:
    assert run(nano_dir, "--served", packed_dir) == 0


def test_a_checkpoint_packed_by_another_policy_is_named(
    nano_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    convert(nano_dir, tmp_path / "amax", Recipe(scale_policy="amax"))
    assert run(nano_dir, "--served", tmp_path / "amax", "--json") == 1
    assert json.loads(capsys.readouterr().out)["named"] == ["scale"]


def test_prompts_of_a_file_are_used(nano_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    prompts = tmp_path / "prompts.jsonl"
    chat = json.dumps({"prompt": [{"role": "user", "content": "1+2?"}]})
    prompts.write_text(f'{{"prompt": "3+4?"}}\n{chat}\n{{"input": "5+6?"}}\n')
    assert run(nano_dir, "--prompts", prompts, "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_sequences"] == 3


Make = Callable[[Path, Path], list[object]]


def given(*options: str) -> Make:
    return lambda nano_dir, folder: [nano_dir, *options]


def with_file(option: str, text: str) -> Make:
    def make(nano_dir: Path, folder: Path) -> list[object]:
        file = folder / ("p.jsonl" if option == "--prompts" else "r.yaml")
        file.write_text(text)
        return [nano_dir, option, file]

    return make


def copied(change: Callable[[Path], object]) -> Make:
    """A checkpoint that was changed."""

    def make(nano_dir: Path, folder: Path) -> list[object]:
        shutil.copytree(nano_dir, folder / "other")
        change(folder / "other")
        return [folder / "other"]

    return make


def without_tokens(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def packed_trainer(nano_dir: Path, folder: Path) -> list[object]:
    convert(nano_dir, folder / "packed", Recipe())
    return [folder / "packed"]


def other_shape(nano_dir: Path, folder: Path) -> list[object]:
    write_nano("nano-dense", folder / "longer", num_layers=2)
    return [nano_dir, "--previous", folder / "longer"]


MISTAKES: dict[str, tuple[Make, str]] = {
    "nothing": (lambda nano, tmp: [], "name a CHECKPOINT, or a recorded run with --verl"),
    "both": (lambda nano, tmp: [nano, "--verl", tmp], "name a CHECKPOINT, or a recorded run"),
    "no-checkpoint": (
        lambda nano, tmp: [tmp],
        r"config\.json: missing; name the folder of a checkpoint",
    ),
    "recipe": (given("--recipe", "whole"), "--recipe: whole: use none, full, ffn"),
    "top-p": (given("--top-p", "0"), "top_p: 0.0: needs a number above 0"),
    "prompts": (
        lambda nano, tmp: [nano, "--prompts", tmp / "x"],
        "no such file; name a file with one",
    ),
    "served": (lambda nano, tmp: [nano, "--served", tmp], r"config\.json: missing"),
    "no-prompt": (
        with_file("--prompts", '\n\n{"text": "x"}'),
        r"p\.jsonl, line 3: holds no text and no messages under prompt or input",
    ),
    "recipe-file": (with_file("--recipe", "scale_polcy: pow2"), "scale_polcy"),
    "no-day": (
        with_file("--recipe", "scale_policy: 2024-13-45"),
        r"--recipe: .*r\.yaml: month must be in 1\.\.12",
    ),
    "no-tokenizer": (
        copied(without_tokens),
        "other: (no tokens; save the tokenizer there|its tokenizer cannot be loaded)",
    ),
    "no-vocabulary": (
        copied(lambda folder: (folder / "tokenizer.json").write_text("{}")),
        "other: its tokenizer cannot be loaded",
    ),
    "other-vocabulary": (
        copied(lambda folder: set_keys(folder / "config.json", vocab_size=200)),
        "other: transformers cannot load it",
    ),
    "no-text": (
        with_file("--prompts", '{"prompt": "\\ud800"}'),
        r"p\.jsonl, line 1: cannot be made tokens",
    ),
    "cold": (given("--temperature", "1e-40"), "needs a number, 0.001 or more"),
    "packed": (packed_trainer, "already quantized; name a BF16 or FP32 checkpoint"),
    "damaged": (
        copied(lambda folder: (folder / "model.safetensors").write_bytes(b"x")),
        "other.*(truncated|damaged)",
    ),
    "no-previous": (
        lambda nano, tmp: [nano, "--previous", tmp],
        "holds neither .* name a checkpoint",
    ),
    "other-previous": (other_shape, "longer: other weights or shapes than"),
    "idle-for-a-run": (
        lambda nano, tmp: ["--verl", tmp, "--prompts", "p", "--recipe", "full"],
        r"--prompts, --recipe: changes nothing for a recorded run \(--verl\); leave it out",
    ),
    "idle-for-a-checkpoint": (
        given("--band", "dense"),
        "--band: changes nothing for a checkpoint; leave it out",
    ),
    "exact-on-a-cpu": (given("--exact"), "--exact: kernels of a GPU are exact"),
    "idle-for-exact": (
        given("--exact", "--top-p", "0.9"),
        r"--top-p: changes nothing for an exact comparison \(--exact\); leave it out",
    ),
    "top-k": (given("--top-k", "-2"), "top_k: -2: needs a whole number, 0 for off"),
    "temperature": (given("--temperature", "nan"), "temperature: nan: needs a number, 0"),
    "penalty": (given("--repetition-penalty", "-1"), "repetition_penalty: -1.0: needs"),
}
if not torch.cuda.is_available():
    MISTAKES["cuda"] = (given("--device", "cuda"), "--device: cuda: there is no CUDA GPU here")


@pytest.mark.parametrize(("make", "message"), MISTAKES.values(), ids=MISTAKES)
@pytest.mark.parametrize("nano_dir", ["nano-dense"], indirect=True)
def test_a_mistake_is_one_line_and_exit_code_2(
    make: Make, message: str, nano_dir: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    said = refusal(main, *make(nano_dir, tmp_path)).strip()
    assert re.search(message, said) and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "option", ["--sequences=0", "--max-new-tokens=-1", "--micro-batch=x", "--seed=-1"]
)
def test_numbers_that_cannot_be_are_refused(refusal: Callable[..., str], option: str) -> None:
    said = refusal(main, "checkpoint", option)
    assert f"argument {option.replace('=', ': ')}: needs a whole number" in said
