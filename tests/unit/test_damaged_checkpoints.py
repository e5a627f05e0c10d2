"""Packed checkpoints that were damaged are refused, and the damage is named."""

import json
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qat_core.checkpoint import convert, read_checkpoint
from qat_core.checkpoint.manifest import write_manifest
from qat_core.checkpoint.shards import INDEX, Shards
from qat_core.planning.recipe import Recipe


def test_sha256sum_reads_the_manifest(packed_dir: Path) -> None:
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=packed_dir).returncode == 0


def test_any_flipped_bit_is_reported_with_its_file(packed_dir: Path) -> None:
    for path in sorted(packed_dir.iterdir()):
        if path.name == "SHA256SUMS":
            continue
        original = path.read_bytes()
        damaged = bytearray(original)
        damaged[len(damaged) // 2] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{path.name}: SHA-256 differs"):
            read_checkpoint(packed_dir)
        path.write_bytes(original)
    assert list(read_checkpoint(packed_dir))


def test_a_folder_in_the_place_of_a_shard_is_named(packed_dir: Path) -> None:
    shard = sorted(packed_dir.glob("*.safetensors"))[1]
    shard.unlink()
    shard.mkdir()
    with pytest.raises(ValueError, match=rf"{shard.name}: truncated or not a safetensors file"):
        Shards(packed_dir)


def _truncate(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-7])


def _drop_index_entry(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))


def _weight_map_of_no_map(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": 1}}))


def _rename_in_index(folder: Path) -> None:
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace("model.norm.weight", "model.norm.wait"))


def _wrong_dtype(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[-1]
    save_file({n: t.half() for n, t in load_file(shard).items()}, shard)


def _other_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 20}))


def _more_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))


def _other_ignore(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"].append("re:.*o_proj")
    (folder / "config.json").write_text(json.dumps(config))


def _lose_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def _break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _quantization(folder: Path, *path: str, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    settings = config["quantization_config"]
    for key in path:
        settings = settings[key]
    settings.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def _other_num_bits(folder: Path) -> None:
    _quantization(folder, "config_groups", "group_0", "weights", num_bits=8)


def _other_group_size(folder: Path) -> None:
    _quantization(folder, "config_groups", "group_0", "weights", group_size=32)


def _quantized_activations(folder: Path) -> None:
    _quantization(folder, "config_groups", "group_0", input_activations={"num_bits": 4})


def _ignore_of_no_list(folder: Path) -> None:
    _quantization(folder, ignore="lm_head")


def _ignore_of_no_regex(folder: Path) -> None:
    _quantization(folder, ignore=["re:("])


def _quantization_of_no_map(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": "x"}))


def _rewrite(folder: Path, tensor: str, change: Callable[[torch.Tensor], object]) -> None:
    shard = next(path for path in folder.glob("*.safetensors") if tensor in load_file(path))
    tensors = load_file(shard)
    change(tensors[tensor])
    save_file(tensors, shard)


Q_PROJ = "model.layers.0.self_attn.q_proj"


def _first_block_scale(folder: Path, byte: int) -> None:
    _rewrite(folder, f"{Q_PROJ}.weight_scale", lambda t: t.view(torch.uint8)[0, 0].fill_(byte))


def _nan_block_scale(folder: Path) -> None:
    _first_block_scale(folder, 0x7F)


def _negative_block_scale(folder: Path) -> None:
    _first_block_scale(folder, 0xB8)


def _zero_block_scale(folder: Path) -> None:
    _first_block_scale(folder, 0x00)


def _subnormal_block_scale(folder: Path) -> None:
    _first_block_scale(folder, 0x07)


def _global_scale(folder: Path, value: float) -> None:
    _rewrite(folder, f"{Q_PROJ}.weight_global_scale", lambda t: t.fill_(value))


def _nan_global_scale(folder: Path) -> None:
    _global_scale(folder, math.nan)


def _zero_global_scale(folder: Path) -> None:
    _global_scale(folder, 0.0)


def _negative_global_scale(folder: Path) -> None:
    _global_scale(folder, -4.0)


def _infinite_global_scale(folder: Path) -> None:
    _global_scale(folder, math.inf)


def _other_scale_than_its_group(folder: Path) -> None:
    _global_scale(folder, 2.0**-9)


def _nan_weight(folder: Path) -> None:
    _rewrite(folder, "model.norm.weight", lambda t: t[0].fill_(math.nan))


DAMAGES = [
    (_other_num_bits, r"group_0\.weights\.num_bits: 8: only 4"),
    (_other_group_size, r"group_0\.weights\.group_size: 32: only 16"),
    (_quantized_activations, r"group_0\.input_activations: .* only None"),
    (_ignore_of_no_list, r"quantization_config\.ignore: 'lm_head'"),
    (_nan_block_scale, rf"{Q_PROJ}\.weight: a block scale is NaN, negative"),
    (_negative_block_scale, rf"{Q_PROJ}\.weight: a block scale is NaN, negative"),
    (_zero_block_scale, rf"{Q_PROJ}\.weight: a block scale is NaN, negative"),
    (_subnormal_block_scale, rf"{Q_PROJ}\.weight: a block scale is .* below 2\*\*-6"),
    (_nan_global_scale, rf"{Q_PROJ}\.weight: global scale \[?nan\]?: not finite"),
    (_zero_global_scale, rf"{Q_PROJ}\.weight: global scale \[?0\.0\]?: not finite"),
    (_negative_global_scale, rf"{Q_PROJ}\.weight: global scale \[?-4\.0\]?: not finite"),
    (_infinite_global_scale, rf"{Q_PROJ}\.weight: global scale \[?inf\]?: not finite"),
    (_other_scale_than_its_group, r"proj\.weight: global scale .* as one matrix with one scale"),
    (_nan_weight, r"model\.norm\.weight: holds NaN or infinity"),
    (_truncate, "model-00002.*truncated"),
    (_weight_map_of_no_map, r"weight_map: needs file names by tensor"),
    (_quantization_of_no_map, r"quantization_config: 'x': needs to be a mapping"),
    (_ignore_of_no_regex, r"quantization_config\.ignore: 're:\(': not a regex"),
    (_drop_index_entry, r"has no entry for model\.norm\.weight"),
    (_rename_in_index, r"has no entry for model\.norm\.weight"),
    (_wrong_dtype, r"model\.norm\.weight is torch\.float16"),
    (_other_config, r"model\.embed_tokens\.weight is .*\(18, 128\), needs .*\(20, 128\)"),
    (_more_layers, r"num_hidden_layers|missing: model\.layers\.1\."),
    (_other_ignore, r"o_proj\.weight"),
    (_lose_shard, "model-00002.*missing"),
    (_break_config, r"config\.json: not valid JSON"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[d.__name__[1:] for d, _ in DAMAGES])
def test_damage_behind_a_valid_manifest_is_named(
    packed_dir: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(packed_dir)
    rewrite_manifest(packed_dir)
    with pytest.raises(ValueError, match=message):
        list(read_checkpoint(packed_dir))


@pytest.mark.parametrize("nano_dir", ["nano-moe"], indirect=True)
def test_experts_gate_and_up_need_one_scale(packed_dir: Path) -> None:
    gate = "model.layers.0.mlp.experts.1.gate_proj"
    _rewrite(packed_dir, f"{gate}.weight_global_scale", lambda t: t.mul_(2))
    rewrite_manifest(packed_dir)
    with pytest.raises(ValueError, match=r"experts\.1\.up_proj.*as one matrix with one scale"):
        list(read_checkpoint(packed_dir))


def rewrite_manifest(folder: Path) -> None:
    (folder / "SHA256SUMS").unlink()
    write_manifest(folder)


def test_a_size_that_cannot_be_packed_is_named_with_its_file(
    nano_dir: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(nano_dir, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"hidden_size": 129}))
    with pytest.raises(
        ValueError, match=r"config\.json: .* input size 129 is not a multiple of 16"
    ):
        convert(source, tmp_path / "packed", Recipe.full())
