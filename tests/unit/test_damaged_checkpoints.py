"""Packed checkpoints that were damaged are refused, and the damage is named."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from qat_core.checkpoint import read_checkpoint
from qat_core.checkpoint.manifest import write_manifest
from qat_core.checkpoint.shards import INDEX


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


def _truncate(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-7])


def _drop_index_entry(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))


def _rename_in_index(folder: Path) -> None:
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace("model.norm.weight", "model.norm.wait"))


def _wrong_dtype(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[-1]
    save_file({n: t.float() for n, t in load_file(shard).items()}, shard)


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


DAMAGES = [
    (_truncate, "model-00002.*truncated"),
    (_drop_index_entry, r"has no entry for model\.norm\.weight"),
    (_rename_in_index, r"has no entry for model\.norm\.weight"),
    (_wrong_dtype, r"model\.norm\.weight is torch\.float32"),
    (_other_config, r"model\.embed_tokens\.weight is .*\(18, 128\), needs .*\(20, 128\)"),
    (_more_layers, r"num_hidden_layers|missing: model\.layers\.1\."),
    (_other_ignore, r"o_proj\.weight"),
    (_lose_shard, "model-00002.*missing"),
    (_break_config, r"config\.json: no valid JSON"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[d.__name__[1:] for d, _ in DAMAGES])
def test_damage_behind_a_valid_manifest_is_named(
    packed_dir: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(packed_dir)
    write_manifest_anew(packed_dir)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(packed_dir)


def write_manifest_anew(folder: Path) -> None:
    (folder / "SHA256SUMS").unlink()
    write_manifest(folder)
