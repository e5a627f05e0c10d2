"""`python -m tests.integration.tensor_parallel MODEL_DIR TP EP OUT`: what each worker loads.

vLLM with TP workers, each a process, on a CPU or on as many GPUs. A stream as verl sends it is
loaded in each, and the packed tensors of every layer are saved as OUT/<rank>.pt, before vLLM brings
them into the layout of its kernels. On GPUs the stream is loaded in place too, over another one;
what then differs from a reload's is saved as OUT/<rank>.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions are sent to the workers
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

import torch
from transformers import AutoModelForCausalLM
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from qat_core.planning.plan import plan
from qat_core.planning.quantization_config import quantization_config
from qat_core.planning.recipe import Recipe
from qat_core.rollout.vllm.bucketed_loader import BucketedLoader
from qat_core.rollout.vllm.plugin import register
from qat_core.rollout.vllm.switches import IN_PLACE_VARIABLE
from qat_core.verl.configuration import engine_patterns
from qat_core.weights.stream import weight_stream
from qat_core.weights.transfer import transfer_tensors
from tests.marlin_layers import all_tensors

STREAM = "stream.pt"


def load(worker: Any, folder: str) -> None:
    """In a worker: loads the stream through vLLM's reload and saves what came, layer by layer."""
    os.environ[IN_PLACE_VARIABLE] = "0"
    loaded: list[tuple[str, list[int], dict[str, torch.Tensor]]] = []
    for module in worker.model_runner.get_model().modules():
        if quantized(module):
            record(module.quant_method, loaded)
    with BucketedLoader(worker) as loader:
        loader.take(torch.load(f"{folder}/{STREAM}"))
    torch.save(loaded, f"{folder}/{worker.rank}.pt")


def load_in_place(worker: Any, folder: str) -> None:
    """In a worker on a GPU: saves names of tensors that a sync in place leaves other than a reload.

    Before it, matrices with their rows in another order are loaded. Saved too is how many tensors
    these change, and how many weights were written in place.
    """
    stream = torch.load(f"{folder}/{STREAM}")
    other = [(name, tensor if tensor.ndim < 2 else upside_down(tensor)) for name, tensor in stream]
    held = []
    for in_place, sent in (("0", other), ("0", stream), ("0", other), ("1", stream)):
        os.environ[IN_PLACE_VARIABLE] = in_place
        with BucketedLoader(worker) as loader:
            loader.take(sent)
        held.append(all_tensors(worker))
    first, reloaded, _, written = held
    found = {
        "differ": [name for name, it in reloaded.items() if not torch.equal(it, written[name])],
        "replaced": sum(not torch.equal(it, first[name]) for name, it in reloaded.items()),
        "in_place": len(worker.qat_core_targets),
    }
    Path(folder, f"{worker.rank}.json").write_text(json.dumps(found))


def upside_down(matrix: torch.Tensor) -> torch.Tensor:
    """Rows, or experts, from the last to the first; PyTorch flips no float8."""
    return matrix.view(torch.uint8).flip(0).view(matrix.dtype)


def quantized(module: Any) -> bool:
    """Whether vLLM takes the layer packed."""
    parameters, _ = get_layerwise_info(module).restore_metadata
    return any(name.endswith("weight_packed") for name in parameters)


def record(method: Any, loaded: list[Any]) -> None:
    """Notes what a layer has loaded when vLLM is about to process it."""
    process = method.process_weights_after_loading

    def recorded(layer: Any) -> None:
        widths = getattr(layer, "output_partition_sizes", [])
        tensors = {
            name: tensor.data.cpu().clone()
            for name, tensor in layer.named_parameters()
            if name.endswith(("weight_packed", "weight_scale", "weight_global_scale"))
        }
        loaded.append((type(layer).__name__, list(widths), tensors))
        process(layer)

    method.process_weights_after_loading = recorded


def main(model_dir: str, tp: str, ep: str, out: str) -> None:
    """Serves, loads, saves."""
    import vllm

    register()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    recipe = Recipe()
    checked = plan(model, recipe)
    stream = list(transfer_tensors(checked, weight_stream(model, checked, recipe)))
    Path(out).mkdir()
    torch.save(stream, f"{out}/{STREAM}")
    declared = quantization_config("compressed-tensors", engine_patterns(recipe))
    llm = vllm.LLM(
        model_dir,
        dtype="bfloat16",
        load_format="dummy",
        hf_overrides={"quantization_config": declared},
        tensor_parallel_size=int(tp),
        enable_expert_parallel=bool(int(ep)),
        max_model_len=64,
        gpu_memory_utilization=0.01,  # has to be free when it starts
        kv_cache_memory_bytes=2**26,
        enforce_eager=True,
        enable_chunked_prefill=False,
    )
    llm.collective_rpc(load, args=(out,))
    if int(ep) and not torch.cuda.is_available():
        return  # vLLM's CPU worker terminates in generation after loading so
    if torch.cuda.is_available():
        llm.collective_rpc(load_in_place, args=(out,))
    sampling = vllm.SamplingParams(temperature=0, max_tokens=4, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": [3, 14, 4, 17]}], sampling, use_tqdm=False)
    torch.save(outputs[0].outputs[0].cumulative_logprob, f"{out}/log_prob.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
