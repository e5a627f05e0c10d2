"""Rounding error of NVFP4 on real pretrained weights, by block-scale search and global scale.

    python -m experiments.benchmarks.block_scale_error RECORD.json

The weights are those of SmolLM2-135M-Instruct as study smollm2 reads them: a GGUF file, in which
llama.cpp had stored them with 4 to 8 bits, so what is measured is a second rounding. Normal
deviates beside them, as many as there are weights in the largest layer, show what that changes.
Error: root mean square of q - w relative to that of w, over all weights of a kind.
"""

import argparse
import json
from collections import defaultdict
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from experiments.base.gguf import find_gguf
from experiments.runs.provenance import digest_file, origin
from experiments.study.load import load_study
from experiments.study.models import GgufModel
from experiments.study.schema import STUDIES
from experiments.support.cli import run_cli
from qat_core.nvfp4 import fake_quantize, global_scale, group_amax
from qat_core.options import BlockScaleMethod, ScalePolicy
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe

Group = dict[str, Tensor]  # weights that share a global scale, by name
OVERALL, NORMAL = "all weights", "normal deviates"
NORMAL_SHAPE = (1536, 576)


def main() -> None:
    """Measures, prints a table and writes the record to the path given."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path, help="JSON file to write")
    record_path: Path = parser.parse_args().record
    file = smollm2_file()
    groups = weight_groups(file)
    normal = [{NORMAL: torch.randn(NORMAL_SHAPE, generator=torch.Generator().manual_seed(0))}]
    settings = product(get_args(ScalePolicy), get_args(BlockScaleMethod))
    rows = [measure(groups, normal, *setting) for setting in settings]
    print_table(rows)
    record = {
        "benchmark": "block_scale_error",
        **origin("cpu"),
        "file": file.name,
        "sha256": digest_file(file),
        "stored_as": storage_types(file),
        "weights": sum(w.numel() for group in groups for w in group.values()),
        "relative_rms_error": rows,
    }
    record_path.write_text(json.dumps(record, indent=1) + "\n")


def smollm2_file() -> Path:
    """The model file of study smollm2, in its installed package."""
    ((name, source),) = load_study(STUDIES / "smollm2.yaml").models.items()
    assert isinstance(source, GgufModel)
    return find_gguf(name, source)


def weight_groups(file: Path) -> list[Group]:
    """The weights that the full recipe quantizes, BF16."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16
    )
    groups = plan(model, Recipe.full()).groups.values()
    return [{name: model.get_parameter(name).detach() for name in names} for names in groups]


def storage_types(file: Path) -> dict[str, int]:
    """Number of the file's tensors of each storage type."""
    from gguf import GGUFReader

    counts: dict[str, int] = defaultdict(int)
    for tensor in GGUFReader(file).tensors:
        counts[tensor.tensor_type.name] += 1
    return dict(counts)


def measure(
    groups: list[Group], normal: list[Group], scale: ScalePolicy, block_scale: BlockScaleMethod
) -> dict[str, Any]:
    """Relative error by layer kind, of all weights together, and of the normal deviates."""
    by_kind = squared_sums(groups, scale, block_scale)
    total = torch.stack(list(by_kind.values())).sum(0)
    sums = {**by_kind, OVERALL: total, **squared_sums(normal, scale, block_scale)}
    errors = {kind: sqrt(error / signal) for kind, (error, signal) in sums.items()}
    return {"scale": scale, "block_scale": block_scale, **errors}


def squared_sums(
    groups: list[Group], scale: ScalePolicy, block_scale: BlockScaleMethod
) -> dict[str, Tensor]:
    """For each kind FP64 (2,): sum of (q - w)**2 and of w**2."""
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    amax = group_amax([list(group.values()) for group in groups])
    for group, group_scale in zip(groups, global_scale(torch.stack(amax), scale), strict=True):
        for name, w in group.items():
            q = fake_quantize(w, group_scale, block_scale, name=name).double()
            kind = name.removesuffix(".weight").rpartition(".")[2]
            sums[kind] += torch.stack([(q - w).square().sum(), w.double().square().sum()])
    return dict(sums)


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line for each kind of weight, errors in percent."""
    names = [f"{row['scale']} {row['block_scale']}" for row in rows]
    table = Table("", *names, title="RMS error relative to the weights', %")
    for kind in list(rows[0])[2:]:
        table.add_row(kind, *(f"{100 * row[kind]:.2f}" for row in rows))
    Console().print(table)


if __name__ == "__main__":
    run_cli(main)
