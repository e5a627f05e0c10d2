"""Small Qwen3 architectures for benchmarks of vLLM, and how its engines are started there."""

from typing import Any

from experiments.study.schema import ROOT
from experiments.support.json_files import Json, read_json
from qat_core.units import BYTES_PER_GIB

MODELS = ROOT / "experiments" / "models"


def read_architecture(name: str) -> Json:
    """The config.json of one of `experiments/models`."""
    return read_json(MODELS / f"{name}.json")


DENSE, MOE = map(read_architecture, ("random-dense", "random-moe"))
ARCHITECTURES = {"dense": DENSE, "moe": MOE}
# for a rehearsal without a GPU
TINY = {"num_hidden_layers": 2, "hidden_size": 128, "head_dim": 64, "vocab_size": 64}


def engine_settings(device: str, max_num_seqs: int, *, compiled: bool = False) -> dict[str, Any]:
    """For `VllmEngine`: a small KV cache; on CUDA, graphs of a decode step of `max_num_seqs`."""
    settings: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": max_num_seqs}
    if device == "cpu":
        return settings | {"kv_cache_memory_bytes": 2**26, "enforce_eager": not compiled}
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": [max_num_seqs]}
    if not compiled:
        graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return settings | {
        "kv_cache_memory_bytes": 8 * BYTES_PER_GIB,
        "compilation_config": graphs,
        "gpu_memory_utilization": 0.01,  # only checked against free memory
    }
