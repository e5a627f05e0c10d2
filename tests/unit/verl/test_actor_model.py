"""What a command says of its model and its switches before Ray starts, and refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from qat_core.verl.rules import VLLM
from tests.families import tiny_config
from tests.files import edit_json
from tests.nano_models import said_to_be_tied, write_nano
from tests.verl_configurations import COMMAND, CONFIGS, QAT, completed, started
from tests.workflow.verl_cases import CASES, Case, command
from tests.workflow.verl_gpu_cases import GPU_CASES, gpu_command

PATH, OVERRIDE = (f"actor_rollout_ref.model.{key}" for key in ("path", "override_config"))


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    write_nano("nano-dense", tmp_path / "dense", num_layers=2)
    return tmp_path / "dense"


PACKED = {
    "full": (
        [],
        "rollouts in NVFP4 (w4a16), trained in NVFP4; scale_policy pow2, block_scale_method max; "
        "ignored: lm_head, embed_tokens, re:.*mlp.gate$; packed: 14 of ",
        "(2x q_proj, 2x k_proj, 2x v_proj, 2x o_proj, 2x gate_proj, 2x up_proj, 2x down_proj); "
        "kernels: linear layers humming, experts marlin",
    ),
    "ffn without qat": (
        [f"{QAT}.ignore_patterns=['re:.*attn.*']", f"{QAT}.train=false"],
        "rollouts in NVFP4 (w4a16), trained in BF16; scale_policy pow2, block_scale_method max; "
        "ignored: re:.*attn.*; packed: 6 of ",
        "(2x gate_proj, 2x up_proj, 2x down_proj); kernels: linear layers humming, experts marlin",
    ),
    "bf16": ([f"{QAT}.enable=false"], "BF16 in training and rollouts, synced", "project's worker"),
}


@pytest.mark.parametrize(("overrides", "start", "end"), PACKED.values(), ids=PACKED)
def test_a_right_command_says_in_a_line_what_will_run(
    dense: Path,
    overrides: list[str],
    start: str,
    end: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QAT_CORE_LINEAR_KERNEL", "humming")
    started(*COMMAND, f"{PATH}={dense}", *overrides)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"qat_core: {start}") and line.endswith(end)


@pytest.mark.parametrize(
    ("ignored", "linear", "experts"),
    [([], "marlin", "marlin"), (["re:.*experts.*"], "marlin", "triton")],
    ids=["all", "but experts"],
)
def test_kernels_of_a_gpu_are_named(
    tmp_path: Path, ignored: list[str], linear: str, experts: str
) -> None:
    write_nano("nano-moe", tmp_path / "moe", num_layers=2)
    given = (f"{PATH}={tmp_path / 'moe'}", f"{QAT}.ignore_patterns={ignored}")
    named = completed(*given).actor_rollout_ref.rollout.engine_kwargs.vllm
    assert (named.linear_backend, named.moe_backend) == (linear, experts)
    for spelt in ("marlin", "MARLIN"):  # as vLLM takes it
        completed(*given, f"+{VLLM}.linear_backend={spelt}")
    with pytest.raises(ValueError, match=r"moe_backend: cutlass: this project names .*; remove"):
        completed(*given, f"+{VLLM}.moe_backend=cutlass")
    on_cpu = completed(*given, "trainer.device=cpu").actor_rollout_ref.rollout.engine_kwargs.vllm
    assert "linear_backend" not in on_cpu


def test_of_a_model_that_is_not_on_this_machine_the_line_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    started(*COMMAND, f"{PATH}=/not/here")
    assert "packed: known once workers have read /not/here (OSError)" in capsys.readouterr().out


@pytest.mark.verl_table(
    "a model whose weights vLLM loads past its reload (gpt-oss)",
    "refused, with `+nvfp4=off` too",
    cases=["w4a16", "off"],
)
@pytest.mark.parametrize("choice", ["w4a16", "off"])
def test_a_model_that_cannot_be_synced_is_refused(tmp_path: Path, choice: str) -> None:
    config = tiny_config("gpt_oss")
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(tmp_path)
    message = rf"error: {PATH}: .*: weight sync: vLLM's GptOssForCausalLM copies experts"
    with pytest.raises(SystemExit, match=message):
        started(f"+nvfp4={choice}", *COMMAND[1:], f"{PATH}={tmp_path}")


@pytest.mark.verl_table(
    "an output head with values of its own, where config.json has `tie_word_embeddings: true`",
    "refused, with `+nvfp4=off` too; where workers alone have the files, by the first sync",
    cases=["w4a16", "off"],
)
@pytest.mark.parametrize("choice", ["w4a16", "off"])
def test_a_model_whose_head_engines_would_not_read_is_refused(
    dense: Path, tmp_path: Path, choice: str
) -> None:
    folder = said_to_be_tied(dense, tmp_path / "tied")
    message = rf"error: {PATH}: {folder}: lm_head\.weight: has values of its own"
    with pytest.raises(SystemExit, match=message):
        started(f"+nvfp4={choice}", *COMMAND[1:], f"{PATH}={folder}")


@pytest.mark.verl_table("an adapter beside the weights (`adapter_config.json`)", "refused")
def test_a_model_whose_files_workers_would_refuse_is_refused(dense: Path) -> None:
    (dense / "adapter_config.json").touch()
    with pytest.raises(SystemExit, match=rf"error: {PATH}: {dense}: holds adapter_config\.json"):
        started(*COMMAND, f"{PATH}={dense}")


def test_a_model_that_names_no_class_is_refused(dense: Path) -> None:
    edit_json(dense / "config.json", lambda config: config.pop("architectures"))
    message = rf"error: {PATH}: {dense}: config.json: architectures: missing"
    with pytest.raises(SystemExit, match=message):
        started(*COMMAND, f"{PATH}={dense}")


VOID = "matches nothing in Qwen3ForCausalLM"
REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "patterns": (
        [f"{QAT}.ignore_patterns=[self_atn,'*mlp*']"],
        [rf"{QAT}\.ignore_patterns: '{p}' {VOID}: correct it" for p in ("self_atn", r"\*mlp\*")],
    ),
    "part of a fused weight": (
        [f"{QAT}.ignore_patterns=[k_proj]"],
        [rf"{PATH}: .*: model\.layers\.{i}\.self_attn\.k_proj\.weight is left" for i in (0, 1)],
    ),
    "sizes that the command sets": (
        [f"+{OVERRIDE}.intermediate_size=100"],
        [
            r".*override_config\.intermediate_size: 100 in the trainer, but \d+ in vLLM",
            *(
                rf"{PATH}: .*: model\.layers\.{i}\.mlp\.down_proj\.weight: input size 100"
                for i in (0, 1)
            ),
        ],
    ),
    "another computation in the trainer": (
        [f"+{OVERRIDE}.rms_norm_eps=0.1", f"+{OVERRIDE}.attention_dropout=0.1"],
        [r".*override_config\.rms_norm_eps: 0\.1 in the trainer, but 1e-06 in vLLM: give"],
    ),
    "a key that the model does not have": (
        [f"+{OVERRIDE}.rope_theta=5.0"],
        [r".*override_config\.rope_theta: 5\.0: Qwen3Config has no such key; correct or remove it"],
    ),
    "another computation in vLLM": (
        [f"+{VLLM}.hf_overrides={{rms_norm_eps: 0.1, max_position_embeddings: 64}}"],
        [r".*override_config\.rms_norm_eps: 1e-06 in the trainer, but 0\.1 in vLLM: give"],
    ),
    "routes without experts": (["+routing_replay=r3"], [r".*mode: R3: the model has no experts"]),
}


@pytest.mark.parametrize(("overrides", "lines"), REFUSED.values(), ids=REFUSED)
def test_what_the_model_does_not_have_is_refused(
    dense: Path, overrides: list[str], lines: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        started(*COMMAND, f"{PATH}={dense}", *overrides)
    said = ended.value.code.split("\n")
    assert len(said) == len(lines)
    for line, expected in zip(said, lines, strict=True):
        assert re.match(f"error: {expected}", line), line


def test_patterns_of_a_quantization_json_are_looked_at_too(dense: Path, declared: Any) -> None:
    with pytest.raises(SystemExit, match=rf"ignore_patterns: 're:\.\*self_atn\.\*' {VOID}"):
        started(
            *COMMAND,
            f"{PATH}={dense}",
            f"{QAT}.ignore_patterns=[]",
            f"{QAT}.quantization_config_path={declared}",
        )


@pytest.fixture
def declared(tmp_path: Path) -> Path:
    from tests.unit.verl.test_configuration import declared as content

    (tmp_path / "given.json").write_text(json.dumps(content() | {"ignore": ["re:.*self_atn.*"]}))
    return tmp_path / "given.json"


def test_kernels_and_variables_that_are_not_known_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {
        "QAT_CORE_LINEAR_KERNEL": "hummin",
        "QAT_CORE_EXPERTS_KERNEL": "marlin-unpack",  # of linear layers alone
        "QAT_CORE_IN_PLACE_SYNC": "false",
        "QAT_CORE_LINEAR_KERNELS": "humming",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        started(*COMMAND)
    lines = ended.value.code.split("\n")
    assert len(lines) == len(values)
    assert "error: QAT_CORE_LINEAR_KERNEL=hummin: use vllm-humming-invariant, " in lines[1]
    assert "error: QAT_CORE_LINEAR_KERNELS: nothing reads it; the variables are" in lines[0]


TEXTS = ["off", "no", "'false'", "0", "null", "[]"]


@pytest.mark.parametrize("key", ["enable", "train"])
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_neither_true_nor_false_is_refused(key: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"qat\.{key}: .*: use true or false"):
        completed(f"{QAT}.{key}={text}")


@pytest.mark.parametrize("key", ["enable", "train"])
def test_a_variable_of_the_environment_is_a_text(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("SWITCH", "false")
    with pytest.raises(SystemExit, match=rf"error: .*qat\.{key}: 'false': use true or false"):
        started(*COMMAND, f"{QAT}.{key}=${{oc.env:SWITCH}}")
    completed(f"{QAT}.{key}='${{oc.decode:${{oc.env:SWITCH}}}}'")


@pytest.mark.parametrize("value", ["off", None, 0])
def test_workers_refuse_them_too(value: object) -> None:
    engine = pytest.importorskip("qat_core.verl.engine")
    for key in ("enable", "train"):
        with pytest.raises(ValueError, match=rf"qat\.{key}: .*: use true or false"):
            engine.NvFp4Config(**{key: value})


FILES = {
    "verl.experimental.one_step_off_policy.main_ppo": CONFIGS["one-step-off"],
    "verl.experimental.fully_async_policy.fully_async_main": CONFIGS["fully-async"],
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_on_a_cpu_is_accepted(tmp_path: Path, case: Case) -> None:
    arguments = command(case, tmp_path, tmp_path).arguments
    overrides = arguments[arguments.index(case.module) + 1 :]
    started(*overrides, config=FILES.get(case.module, CONFIGS["ppo"]))


@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES)
def test_a_case_on_gpus_is_accepted(tmp_path: Path, case: Case) -> None:
    arguments = gpu_command(case, tmp_path, tmp_path).arguments
    assert arguments[5:7] == ["--config-name", "verl"]
    path = "hydra.searchpath=[pkg://verl.trainer.config]"
    content = started(*arguments[7:], path, config=tmp_path / "verl")
    assert content.trainer.n_gpus_per_node == case.gpus
    assert content.trainer.total_training_steps == case.steps
    assert "experiments.verl.seeded_engine" in content.actor_rollout_ref.model.external_lib
