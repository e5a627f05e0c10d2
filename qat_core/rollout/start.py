"""Start the rollout engine that a study names."""

import os
from pathlib import Path
from typing import Any

from qat_core.options import EngineKind
from qat_core.planning.plan import QuantPlan
from qat_core.rollout.eager import EagerEngine
from qat_core.rollout.engine import RolloutEngine
from qat_core.units import BYTES_PER_GIB

CUDA_SETTINGS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
KV_CACHE_BYTES = 2**34  # next to a trainer: room for rollouts of small models
KV_CACHE_SHARE = 0.25  # of what a run may take of a GPU that others use too


def start_engine(
    kind: EngineKind,
    model_dir: Path,
    device: str,
    packed: QuantPlan | None,
    max_tokens: int,
    beside_trainer: bool = True,
    keeps_distributions: bool = False,
    returns_routes: bool = False,
    gpu_memory_gib: float | None = None,
    exact: bool = False,
) -> RolloutEngine:
    """An engine in this process for the architecture in `model_dir`; sync weights before use.

    Args:
        packed: what will come, and be served, in NVFP4.
        max_tokens: of prompt and response together.
        beside_trainer: leave memory of the GPU to others; else vLLM's default of 90 %.
        keeps_distributions, returns_routes: see `Rollouts`; the first of the eager engine only.
        gpu_memory_gib: what this process may take of a GPU that others use too.
        exact: rollouts have bits that training computes too; vLLM only.
    """
    if exact and (kind != "vllm" or device != "cuda"):
        raise ValueError("exact: only vLLM's kernels on a GPU are; use rollout: vllm, device: cuda")
    if kind == "eager":
        return EagerEngine(
            model_dir,
            device,
            max_tokens=max_tokens,
            keeps_distributions=keeps_distributions,
            returns_routes=returns_routes,
        )
    if keeps_distributions:
        raise ValueError(
            "rollout: vllm returns no whole distributions, which rl.measure_drift_term and "
            "rl.correction: score_centering need; use eager"
        )
    settings = memory_settings(device, beside_trainer, gpu_memory_gib)
    settings |= {"max_model_len": max_tokens} | (CUDA_SETTINGS if device == "cuda" else {})
    if returns_routes:
        settings["enable_return_routed_experts"] = True
    return _start_vllm(model_dir, packed, exact, settings)


def _start_vllm(
    model_dir: Path, packed: QuantPlan | None, exact: bool, settings: dict[str, Any]
) -> RolloutEngine:
    # its warnings here are of what it does by itself, such as rotary embeddings without weights
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from qat_core.rollout.vllm.engine import VllmEngine

        return VllmEngine(model_dir, packed, exact=exact, **settings)
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ValueError(
            "rollout: vllm is not installed here: see requirements/engines.txt"
        ) from None


def memory_settings(
    device: str, beside_trainer: bool, gpu_memory_gib: float | None
) -> dict[str, Any]:
    """vLLM's settings of memory, see `start_engine`; none on a CPU, or for its default of 90 %.

    With a cache of a given size vLLM measures no memory, which others take and free meanwhile. Of
    `gpu_memory_utilization` it then only checks that so much is free when it starts.
    """
    if device == "cpu" or (gpu_memory_gib is None and not beside_trainer):
        return {}
    cache_bytes = KV_CACHE_BYTES
    if gpu_memory_gib is not None:
        cache_bytes = int(KV_CACHE_SHARE * gpu_memory_gib * BYTES_PER_GIB)
    return {"kv_cache_memory_bytes": cache_bytes, "gpu_memory_utilization": 0.01}
