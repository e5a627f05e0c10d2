"""Preview of a study: its runs and their predicted weight memory. Needs no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.study.arms import ARMS
from experiments.study.model_config import read_model_config
from experiments.study.models import GgufModel
from experiments.study.schema import ROOT, Study
from qat_core.planning.predicted_memory import Precision, predict_weight_memory_gib
from qat_core.units import show_memory

HEADER = ("model", "arm", "runs", "seeds", "rollout weights, predicted")


def preview(study: Study) -> str:
    """The runs of a study and their predicted weight memory, one line per arm."""
    gpus = f"{study.gpus} GPU{'s' * (study.gpus > 1)} each" if study.device == "cuda" else "no GPU"
    head = f"Study {study.study}: {len(study.runs)} runs, trainer {study.trainer}, {gpus}"
    rows = [HEADER]
    for model in study.models:
        for arm in study.arms:
            count = sum((run.model, run.arm) == (model, arm) for run in study.runs)
            memory = _describe_memory(study, model, ARMS[arm].rollout_recipe)
            rows.append((model, arm, str(count), show_seeds(study.seeds), memory))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([head, *lines, *(_describe_cell(study, name) for name in study.cells)])


def show_seeds(seeds: Sequence[int]) -> str:
    """Neighbours as a range: 0 to 4, 7."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ", ".join(f"{it[0]} to {it[-1]}" if len(it) > 1 else str(it[0]) for it in parts)


def _describe_cell(study: Study, name: str) -> str:
    cell = study.cells[name]
    runs = sum(run.cell == name for run in study.runs)
    replaced = ", ".join(f"{key} {value}" for key, value in cell.replaced().items())
    return f"cell {name}: {runs} runs, {replaced or 'as the study'}"


def _describe_memory(study: Study, model: str, packed: Precision | None) -> str:
    source = study.models[model]
    if isinstance(source, GgufModel):
        return "known once its file has been read"
    hint = f"correct it, or name another file in models.{model}.config"
    config = read_model_config(ROOT / source.config, hint)
    _require_positions(study, source.config, config)
    multiple = study.vocabulary_multiple
    try:
        bf16_gib = predict_weight_memory_gib(config, "bf16", multiple)
        packed_gib = predict_weight_memory_gib(config, packed, multiple) if packed else None
    except ValueError as error:
        raise ValueError(f"{source.config}: {error}") from None
    if packed_gib is None:
        return show_memory(bf16_gib)
    saving = packed_gib / bf16_gib - 1
    return f"{show_memory(bf16_gib)} -> {show_memory(packed_gib)} ({saving:+.1%})"


def _require_positions(study: Study, file: Path, config: dict[str, Any]) -> None:
    """vLLM refuses more tokens than positions, but only once it has started."""
    lengths = study.rl.rollout
    needed = lengths.max_prompt_tokens + lengths.max_response_tokens
    positions = config.get("max_position_embeddings")
    if positions is not None and positions < needed:
        raise ValueError(
            f"{file}: max_position_embeddings: {positions} is less than the {needed} tokens of a "
            "prompt and its response; lower rl.rollout's limits"
        )
