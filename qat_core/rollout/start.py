"""Start the rollout engine that a study names."""

import os
from pathlib import Path
from typing import Any, Literal

from qat_core.plan import QuantPlan
from qat_core.rollout.eager import EagerEngine
from qat_core.rollout.engine import RolloutEngine

EngineKind = Literal["eager", "vllm"]

VLLM_SETTINGS: dict[str, dict[str, Any]] = {
    "cpu": {"enforce_eager": True, "kv_cache_memory_bytes": 2**28},
    "cuda": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
}
# next to a trainer in the same process: room for rollouts of small models, not the whole device
BESIDE_TRAINER: dict[str, dict[str, Any]] = {
    "cpu": {},
    "cuda": {
        "kv_cache_memory_bytes": 2**34,
        "gpu_memory_utilization": 0.5,  # only checked against free memory
    },
}


def start_engine(
    kind: EngineKind,
    model_dir: Path,
    device: str,
    packed: QuantPlan | None,
    max_tokens: int,
    beside_trainer: bool = True,
    keeps_distributions: bool = False,
    returns_routes: bool = False,
) -> RolloutEngine:
    """An engine in this process for the architecture in `model_dir`; sync weights before use.

    Args:
        kind: which one.
        model_dir: BF16 checkpoint with tokenizer.
        device: "cpu" or "cuda".
        packed: what will come, and be served, in NVFP4.
        max_tokens: of prompt and response together.
        beside_trainer: leave memory of the GPU to others; else vLLM takes its usual nine tenths.
        keeps_distributions: rollouts hold the log-probs of all tokens; eager only.
        returns_routes: rollouts hold the experts of all positions.

    Raises:
        ValueError: vLLM is missing or refuses, see `VllmEngine`, or would have to keep
            distributions.
    """
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
    # its warnings here are of what it does by itself, such as rotary embeddings without weights
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from qat_core.rollout.vllm.engine import VllmEngine

        settings = VLLM_SETTINGS[device] | (BESIDE_TRAINER[device] if beside_trainer else {})
        if returns_routes:
            settings["enable_return_routed_experts"] = True
        return VllmEngine(model_dir, packed, max_model_len=max_tokens, **settings)
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ValueError(
            "rollout: vllm is not installed here: see requirements/engines.txt"
        ) from None
