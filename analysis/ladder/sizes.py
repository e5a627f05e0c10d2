"""How large the model of a rung is, from its config.json."""

from math import prod
from typing import Any

from experiments.study.model_config import read_model_config
from experiments.study.models import GgufModel
from experiments.study.schema import ROOT, Study
from qat_core.planning.predicted_memory import weight_shapes


def config_of(study: Study) -> dict[str, Any]:
    """The config.json of a study's one model; ValueError where there is not one such."""
    (first, *others) = study.models.values()
    if others or isinstance(first, GgufModel):
        raise ValueError(f"study {study.study}: models: a rung has one, with a config; correct it")
    return read_model_config(ROOT / first.config, "correct it, or name another file")


def num_parameters(config: dict[str, Any]) -> int:
    """All of a model's weights, embeddings too; of an MoE all experts."""
    return sum(map(prod, weight_shapes(config).values()))
