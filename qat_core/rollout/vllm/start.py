"""What an engine's start checks and sets up before vLLM is started."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from qat_core.checkpoint.ignored_modules import declared_plan
from qat_core.checkpoint.shards import read_json
from qat_core.exact import require_exact
from qat_core.options import CheckpointFormat
from qat_core.planning.plan import QuantPlan, bf16_plan
from qat_core.planning.quantization_config import format_of
from qat_core.rollout.vllm import compat
from qat_core.rollout.vllm.switches import EXACT_SETTINGS, EXACT_VARIABLE, is_exact
from qat_core.weights.hub_names import HubNames

OF_SYNCS: CheckpointFormat = "compressed-tensors"  # whose layout the loaders of syncs know
# of `vllm.LLM`: log-probs of a trainer are compared with these
FIXED_SETTINGS = {"dtype": "bfloat16", "logprobs_mode": "processed_logprobs"}
VLLMS_MODELS = ("auto", "vllm")  # of `model_impl`, not transformers'


def patched_vllm(*, exact: bool) -> Any:
    """The module `vllm`, with what this version lacks here; the environment says what is exact."""
    import vllm
    from vllm.platforms import current_platform

    from qat_core.rollout.vllm.plugin import register

    compat.require_supported(vllm.__version__, on_cpu=current_platform.is_cpu())
    compat.hold_addresses(vllm.__version__)
    compat.correct_rotary_embedding()
    compat.widen_window_blocks()
    is_set_here = exact and not is_exact()
    if is_set_here:
        os.environ[EXACT_VARIABLE] = "1"
    try:
        register()
    except ValueError:
        if is_set_here:  # else the next engine of this process would be refused, too
            del os.environ[EXACT_VARIABLE]
        raise
    return vllm


def planned(
    packed: QuantPlan | None, model_dir: Path, model: nn.Module, names: HubNames
) -> tuple[QuantPlan, CheckpointFormat]:
    """What is to be served in NVFP4, and how: as asked for, else as the checkpoint has it."""
    if packed is not None:
        return packed, OF_SYNCS
    file = model_dir / "config.json"
    declared = read_json(file).get("quantization_config")
    if declared is None:
        return bf16_plan(model), OF_SYNCS
    kind, ignored = format_of(declared, f"{file}: quantization_config")
    return declared_plan(model, names, ignored), kind


def exact_settings(model: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """For bits that the model computes too; ValueError for a setting that has none."""
    require_exact(model.config)
    if (code := settings.get("model_impl", VLLMS_MODELS[0])) not in VLLMS_MODELS:
        raise ValueError(f"model_impl: {code}: exact rollouts need vLLM's own model; remove it")
    for name, needed in EXACT_SETTINGS.items():
        if not isinstance(given := settings.get(name, {}), Mapping):
            raise ValueError(f"{name}: {given}: exact rollouts set {', '.join(needed)}; use a dict")
    return {name: {**settings.get(name, {}), **it} for name, it in EXACT_SETTINGS.items()}


def require_fixed(settings: Mapping[str, Any]) -> None:
    """ValueError for another value of what the engine sets itself."""
    for name, value in FIXED_SETTINGS.items():
        if settings.get(name, value) != value:
            raise ValueError(f"{name}: {settings[name]}: this engine needs {value}; remove it")


def require_no_overrides(settings: Mapping[str, Any], model_dir: Path) -> None:
    """ValueError for `hf_overrides`, which say what is packed, as a plan does."""
    if settings.get("hf_overrides"):
        raise ValueError(
            "hf_overrides: they tell vLLM what `packed` has in NVFP4; change "
            f"{model_dir / 'config.json'} instead"
        )


def require_one_process(settings: Mapping[str, Any], one_worker: Collection[str]) -> None:
    """Keeps vLLM in this process; ValueError where settings or the environment say otherwise."""
    for name in one_worker:
        if settings.get(name, 1) != 1:
            raise ValueError(f"{name}: {settings[name]}: weight syncs reach one worker; use 1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise ValueError("VLLM_ENABLE_V1_MULTIPROCESSING: needs to be 0 for weight syncs")
