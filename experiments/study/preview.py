"""Preview of a study: its runs and their predicted weight memory. Needs no torch."""

from experiments.study.arms import ARMS
from experiments.study.models import GgufModel
from experiments.study.schema import ROOT, Study
from experiments.support.json_files import read_json
from qat_core.memory import Precision, predict_weight_memory_gib
from qat_core.units import show_memory

HEADER = f"{'model':<20} {'arm':<16} {'seeds':<12} rollout weights, predicted"


def preview(study: Study) -> str:
    """The runs of a study and their predicted weight memory, one line per arm.

    Raises:
        ValueError: an arm cannot quantize a model; names the model's config file.
    """
    lines = [f"Study {study.study}: {len(study.runs)} runs, trainer {study.trainer}", HEADER]
    seeds = ", ".join(map(str, study.seeds))
    for model in study.models:
        for arm in study.arms:
            memory = _describe_memory(study, model, ARMS[arm].rollout_recipe)
            lines.append(f"{model:<20} {arm:<16} {seeds:<12} {memory}")
    return "\n".join(lines)


def _describe_memory(study: Study, model: str, packed: Precision | None) -> str:
    source = study.models[model]
    if isinstance(source, GgufModel):
        return "known once its file has been read"
    hint = f"name a model's config.json in models.{model}.config"
    config = dict(read_json(ROOT / source.config, hint))
    try:
        bf16_gib = predict_weight_memory_gib(config, "bf16")
        packed_gib = predict_weight_memory_gib(config, packed) if packed else None
    except KeyError as error:
        raise ValueError(f"{source.config}: {error.args[0]}: missing; add it") from None
    except ValueError as error:
        raise ValueError(f"{source.config}: {error}") from None
    if packed_gib is None:
        return show_memory(bf16_gib)
    saving = packed_gib / bf16_gib - 1
    return f"{show_memory(bf16_gib)} -> {show_memory(packed_gib)} ({saving:+.1%})"
