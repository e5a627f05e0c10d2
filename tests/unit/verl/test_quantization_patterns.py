"""Which modules verl's patterns and its quantization JSON leave in BF16, here and in vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest
from verl.utils.config import omega_conf_to_dataclass

from qat_core.planning.quantization_config import quantization_config
from qat_core.planning.recipe import Recipe, matches
from qat_core.verl.configuration import engine_patterns
from tests.verl_configurations import FULL, QAT, completed, served

NAMES = [
    f"model.layers.{layer}.{leaf}"
    for layer in (0, 11)
    for leaf in (
        *("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "mlp.gate"),
        *("mlp.experts.3.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert_gate"),
    )
]


@pytest.mark.parametrize(
    "pattern", ["self_attn", "layers.1", "model.layers.0.mlp.down_proj", "re:.*layers[.]1.*", "a+b"]
)
def test_a_pattern_leaves_the_same_modules_in_bf16_in_trainer_and_engine(pattern: str) -> None:
    utils = pytest.importorskip(
        "vllm.model_executor.layers.quantization.compressed_tensors.utils", reason="needs vLLM"
    )
    engine = engine_patterns(Recipe(ignore=(pattern,)))
    for name in NAMES:
        is_gate = name.endswith(("mlp.gate", "shared_expert_gate"))
        is_ignored = utils.check_equal_or_regex_match(name, engine)
        assert is_ignored == (matches(pattern, name) or is_gate), name


def declared(**changes: Any) -> dict[str, Any]:
    """verl's JSON for vLLM: keys that NVFP4 does not need, and patterns of its own."""
    content = quantization_config("compressed-tensors", ["lm_head", "re:.*self_attn.*"])
    content |= {"version": "0.12", "kv_cache_scheme": None}
    for key, value in changes.items():
        content["config_groups"]["group_0"][key] = value
    return content


@pytest.fixture
def json_file(tmp_path: Path) -> Path:
    (tmp_path / "nvfp4_w4a16.json").write_text(json.dumps(declared()))
    return tmp_path / "nvfp4_w4a16.json"


def test_verls_quantization_json_is_read(json_file: Path) -> None:
    """As in verl, its `ignore` counts only where the key has no patterns."""
    given = f"{QAT}.quantization_config_path={json_file}"
    assert served(completed(given))["ignore"] == engine_patterns(FULL)
    content = completed(given, f"{QAT}.ignore_patterns=[]")
    patterns = ("lm_head", "re:.*self_attn.*")
    assert served(content)["ignore"] == engine_patterns(Recipe(ignore=patterns))
    qat = omega_conf_to_dataclass(content.actor_rollout_ref.actor).engine.qat
    assert tuple(qat.ignore_patterns) == patterns, "the trainer leaves out the same"


W4A4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MODELOPT = quantization_config("modelopt", [])
BAD_JSON: dict[str, tuple[str, str]] = {
    "none": ("", "No such file or directory"),
    "no-json": ("{", "Expecting property name"),
    "w4a4": (json.dumps(declared(input_activations=W4A4)), "input_activations: .* only None is"),
    "groups": (json.dumps(declared() | {"config_groups": {}}), "config_groups: needs to be one"),
    "format": (json.dumps(declared() | {"format": "int-quantized"}), "not NVFP4"),
    "modelopt": (json.dumps(MODELOPT), "quant_method: modelopt: give compressed-tensors"),
}


@pytest.mark.parametrize(("text", "message"), BAD_JSON.values(), ids=BAD_JSON)
def test_another_quantization_json_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "given.json"
    if text:
        file.write_text(text)
    with pytest.raises(ValueError, match=rf"quantization_config_path: .*given\.json.*{message}"):
        completed(f"{QAT}.quantization_config_path={file}")
