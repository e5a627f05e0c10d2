"""Checkpoints are read whole and as they say, or not at all; damage is named."""

import ast
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from experiments.rl.policy import Policy
from experiments.study.schema import ROOT
from qat_core import convert
from qat_core.checkpoint.load import load_model, require_whole
from qat_core.checkpoint.manifest import write_manifest
from qat_core.checkpoint.read import read_checkpoint
from qat_core.checkpoint.shards import INDEX, Shards
from qat_core.doctor.weights import served_stream
from qat_core.planning.recipe import Recipe
from qat_core.rollout.eager import EagerEngine
from tests.files import edit_json, flip_bit, truncate

Damage = Callable[[Path], object]


def test_sha256sum_reads_the_manifest(packed_dir: Path) -> None:
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=packed_dir).returncode == 0


def test_any_flipped_bit_is_reported_with_its_file(packed_dir: Path) -> None:
    for path in sorted(packed_dir.iterdir()):
        if path.name == "SHA256SUMS":
            continue
        original = path.read_bytes()
        flip_bit(path)
        with pytest.raises(ValueError, match=f"{path.name}: SHA-256 differs"):
            read_checkpoint(packed_dir)
        path.write_bytes(original)
    assert list(read_checkpoint(packed_dir))


def test_what_the_manifest_does_not_list_is_named(packed_dir: Path) -> None:
    manifest = packed_dir / "SHA256SUMS"
    lines = manifest.read_text().splitlines(keepends=True)
    for name in ("config.json", sorted(packed_dir.glob("*.safetensors"))[0].name):
        manifest.write_text("".join(line for line in lines if name not in line.split()))
        with pytest.raises(ValueError, match=f"{name}: not listed in SHA256SUMS"):
            read_checkpoint(packed_dir)


def test_a_folder_in_the_place_of_a_shard_is_named(packed_dir: Path) -> None:
    shard = _shard(packed_dir)
    shard.unlink()
    shard.mkdir()
    with pytest.raises(ValueError, match=rf"{shard.name}: truncated or not a safetensors file"):
        Shards(packed_dir)


def _shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def _edit(file: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        edit_json(folder / file, change)

    return damage


def _config(**changes: object) -> Damage:
    return _edit("config.json", lambda it: it.update(changes))


def _quantization(change: Callable[[dict[str, Any]], object]) -> Damage:
    return _edit("config.json", lambda it: change(it["quantization_config"]))


def _set(key: str, value: object) -> Damage:
    """Of `quantization_config`, by its path there."""

    def change(settings: dict[str, Any]) -> None:
        *path, last = key.split(".")
        for each in path:
            settings = settings[each]
        settings[last] = value

    return _quantization(change)


def _rewrite(tensor: str, change: Callable[[torch.Tensor], object]) -> Damage:
    def damage(folder: Path) -> None:
        shard = next(path for path in folder.glob("*.safetensors") if tensor in load_file(path))
        tensors = load_file(shard)
        change(tensors[tensor])
        save_file(tensors, shard)

    return damage


def _halve(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[-1]
    save_file({n: t.half() for n, t in load_file(shard).items()}, shard)


Q_PROJ = "model.layers.0.self_attn.q_proj"


def _block_scale(byte: int) -> Damage:
    return _rewrite(f"{Q_PROJ}.weight_scale", lambda t: t.view(torch.uint8)[0, 0].fill_(byte))


def _global_scale(value: float) -> Damage:
    return _rewrite(f"{Q_PROJ}.weight_global_scale", lambda t: t.fill_(value))


GROUP = "config_groups.group_0"
SETTINGS = [
    (f"{GROUP}.weights.num_bits", 8, "8: only 4"),
    (f"{GROUP}.weights.group_size", 32, "32: only 16"),
    (f"{GROUP}.input_activations", {"num_bits": 4}, ".* only None"),
    (f"{GROUP}.output_activations", {"num_bits": 8}, ".* only None"),
    ("kv_cache_scheme", {"num_bits": 8}, ".* has to be empty"),
    ("transform_config", {"num_bits": 8}, ".* has to be empty"),
    ("quant_method", "gptq", "'gptq': only 'compressed-tensors'"),
    ("ignore", "lm_head", "'lm_head'"),
    ("ignore", ["re:("], r"'re:\(': not a regex"),
]
WRONG_SCALE = rf"{Q_PROJ}\.weight: a block scale is NaN, negative"
NORM = "model.norm.weight"
DAMAGES: dict[str, tuple[Damage, str]] = {
    **{
        f"{key} {value}": (_set(key, value), rf"quantization_config\.{re.escape(key)}: {said}")
        for key, value, said in SETTINGS
    },
    "other ignore": (_quantization(lambda it: it["ignore"].append("re:.*o_proj")), "o_proj"),
    "NaN block scale": (_block_scale(0x7F), WRONG_SCALE),
    "negative block scale": (_block_scale(0xB8), WRONG_SCALE),
    "block scale 0": (_block_scale(0x00), WRONG_SCALE),
    "subnormal block scale": (_block_scale(0x07), r"a block scale is .* below 2\*\*-6"),
    **{
        f"global scale {it}": (_global_scale(it), rf"global scale \[?{it}\]?: not finite")
        for it in (math.nan, 0.0, -4.0, math.inf)
    },
    "other scale in a group": (
        _global_scale(2.0**-9),
        r"proj\.weight: global scale .* as one matrix with one scale",
    ),
    "NaN weight": (
        _rewrite(NORM, lambda t: t[0].fill_(math.nan)),
        r"model\.norm\.weight: holds NaN or infinity",
    ),
    "cut shard": (lambda folder: truncate(_shard(folder)), "model-00002.*truncated"),
    "lost shard": (lambda folder: _shard(folder).unlink(), "model-00002.*missing"),
    "weight map": (
        _edit(INDEX, lambda it: it.update(weight_map={"a": 1})),
        r"weight_map: needs file names by tensor",
    ),
    "lost entry": (
        _edit(INDEX, lambda it: it["weight_map"].pop(NORM)),
        r"has no entry for model\.norm\.weight",
    ),
    "dtype": (_halve, r"model\.norm\.weight is torch\.float16"),
    "vocabulary": (
        _config(vocab_size=20),
        r"model\.embed_tokens\.weight is .*\(18, 128\), needs .*\(20, 128\)",
    ),
    "layers": (_config(num_hidden_layers=2), r"num_hidden_layers|missing: model\.layers\.1\."),
    "quantization": (
        _config(quantization_config="x"),
        r"quantization_config: 'x': needs to be a mapping",
    ),
    "no JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        r"config\.json: not valid JSON",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damage_behind_a_valid_manifest_is_named(
    packed_dir: Path, damage: Damage, message: str
) -> None:
    damage(packed_dir)
    rewrite_manifest(packed_dir)
    with pytest.raises(ValueError, match=message):
        list(read_checkpoint(packed_dir))


@pytest.mark.parametrize("nano_dir", ["nano-moe"], indirect=True)
def test_experts_gate_and_up_need_one_scale(packed_dir: Path) -> None:
    gate = "model.layers.0.mlp.experts.1.gate_proj"
    _rewrite(f"{gate}.weight_global_scale", lambda t: t.mul_(2))(packed_dir)
    rewrite_manifest(packed_dir)
    with pytest.raises(ValueError, match=r"experts\.1\.up_proj.*as one matrix with one scale"):
        list(read_checkpoint(packed_dir))


def rewrite_manifest(folder: Path) -> None:
    (folder / "SHA256SUMS").unlink()
    write_manifest(folder)


WEIGHTS, MATRIX = "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
READERS: dict[str, Callable[[Path], object]] = {
    "load_model": load_model,
    "require_whole": require_whole,
    "trainer": lambda folder: Policy(folder, None, "cpu"),
    "eager engine": EagerEngine,
    "doctor's served checkpoint": lambda folder: served_stream(folder, None),
    "convert": lambda folder: convert(folder, folder.with_name("packed"), Recipe.full()),
}
EVERYWHERE = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda weights: weights.pop(MATRIX), rf"missing.*: {re.escape(MATRIX)}"),
        (
            lambda weights: weights.update({"model.layers.9.x.weight": torch.ones(2)}),
            r"(unexpected|unknown).*: model\.layers\.9\.x\.weight",
        ),
    ],
    ids=["missing", "without a place"],
)
@EVERYWHERE
def test_a_tensor_that_model_or_file_lacks_is_named(
    nano_dir: Path, tmp_path: Path, read: Callable[[Path], object], edit: Any, message: str
) -> None:
    folder = shutil.copytree(nano_dir, tmp_path / "model")
    weights = load_file(folder / WEIGHTS)
    edit(weights)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match=f"{folder}: .*{message}"):
        read(folder)


@pytest.mark.parametrize("with_index", [True, False], ids=["indexed", "left over"])
@EVERYWHERE
def test_two_sets_of_weights_are_refused(
    nano_dir: Path, tmp_path: Path, read: Callable[[Path], object], with_index: bool
) -> None:
    folder = shutil.copytree(nano_dir, tmp_path / "model")
    (folder / WEIGHTS).unlink()
    load_model(nano_dir).save_pretrained(folder, max_shard_size="100KB")
    index = folder / f"{WEIGHTS}.index.json"
    other = index.name
    if not with_index:
        index.unlink()
        other = min(path.name for path in folder.glob("*.safetensors"))
    (folder / WEIGHTS).symlink_to(nano_dir / WEIGHTS)
    with pytest.raises(ValueError, match=rf"{folder}: holds two sets .*{WEIGHTS}.*{other}"):
        read(folder)


BESIDE = {
    "adapter_config.json": "holds .* beside weights",
    "model.fp16.safetensors": "two sets",
    "hf_quant_config.json": "takes its weights for quantized",
}


@pytest.mark.parametrize(("file", "message"), BESIDE.items(), ids=BESIDE)
@EVERYWHERE
def test_a_file_that_only_some_programs_would_read_is_refused(
    nano_dir: Path, tmp_path: Path, read: Callable[[Path], object], file: str, message: str
) -> None:
    folder = shutil.copytree(nano_dir, tmp_path / "model")
    (folder / file).symlink_to(nano_dir / WEIGHTS)
    with pytest.raises(ValueError, match=rf"{folder}: (?=.*{re.escape(file)}).*{message}"):
        read(folder)


def test_an_index_of_one_file_is_no_second_set(nano_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(nano_dir, tmp_path / "model")
    names = dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": names}))
    stored = load_model(folder).state_dict()
    plain = AutoModelForCausalLM.from_pretrained(nano_dir, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(stored[name], weight) for name, weight in plain.items())


def test_no_other_code_loads_a_model() -> None:
    """A file of GGUF has no names that could be looked up before."""
    allowed = {"qat_core/checkpoint/load.py", "qat_core/checkpoint/architecture.py"}
    allowed |= {"experiments/base/gguf.py"}
    files = [file for room in ("qat_core", "experiments") for file in (ROOT / room).rglob("*.py")]
    found = {
        str(file.relative_to(ROOT))
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "from_pretrained"
        if ast.unparse(node.value) not in ("AutoConfig", "AutoTokenizer")
    }
    assert found == allowed
