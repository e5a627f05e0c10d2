"""Times of the codec on the weights of whole layers and models, for the benchmark `codec`.

Wall clock, launches included, except where CUDA graphs are named.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from triton.testing import do_bench_cudagraph

from experiments.benchmarks.timing import quartiles, synchronize
from qat_core.nvfp4 import (
    PackedTensor,
    fake_quantize,
    global_scale,
    group_amax,
    quantize,
    quantize_all,
)
from qat_core.units import BYTES_PER_GIB

ROUNDS = 50
HIDDEN_8B, KV_8B, FFN_8B = 4096, 1024, 12288
LAYER_8B = [
    [(HIDDEN_8B, HIDDEN_8B), (KV_8B, HIDDEN_8B), (KV_8B, HIDDEN_8B)],
    [(HIDDEN_8B, HIDDEN_8B)],
    [(FFN_8B, HIDDEN_8B), (FFN_8B, HIDDEN_8B)],
    [(HIDDEN_8B, FFN_8B)],
]
LAYER_30B: list[list[tuple[int, ...]]] = [
    [(4096, 2048), (512, 2048), (512, 2048)],
    [(2048, 4096)],
    [(128, 1536, 2048)],
    [(128, 2048, 768)],
]
LAYERS_30B = 48
NANO_LAYERS = 4
LAYER_NANO = [
    [(128, 128), (64, 128), (64, 128)],
    [(128, 128)],
    [(256, 128), (256, 128)],
    [(128, 256)],
]
GROUPS_OF = "groups of q/k/v, o, gate/up, down"


def random_groups(shapes: Sequence[Sequence[tuple[int, ...]]], device: str) -> list[list[Tensor]]:
    """BF16 weights of one layer, by group."""
    return [
        [torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02 for shape in members]
        for members in shapes
    ]


def wall_ms(call: Callable[[], object], device: str = "cuda", rounds: int = ROUNDS) -> list[float]:
    """Lower quartile, median and upper quartile of the wall time, the device idle before and after.

    One call goes unmeasured.
    """
    times = []
    for _ in range(rounds + 1):
        synchronize(device)
        start = perf_counter()
        call()
        synchronize(device)
        times.append((perf_counter() - start) * 1e3)
    return quartiles(times[1:])


def kernel_launches(call: Callable[[], object]) -> dict[str, int]:
    """Kernels that one call puts on the GPU, by name."""
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    events = trace.key_averages()
    return {event.key: event.count for event in events if event.self_device_time_total}


def time_layer_8b() -> dict[str, Any]:
    """Group amax of all weights of a Qwen3-8B layer: launches and time."""
    groups = random_groups(LAYER_8B, "cuda")
    flat = [w for members in groups for w in members]
    copies = [torch.empty_like(w) for w in flat]
    amax_ms = do_bench_cudagraph(lambda: group_amax(groups), rep=200, return_mode="median")
    copy_ms = do_bench_cudagraph(
        lambda: [c.copy_(w) for c, w in zip(copies, flat, strict=True)], return_mode="median"
    )
    return {
        "groups": GROUPS_OF,
        "amax_us": amax_ms * 1e3,
        "of_copy": amax_ms / copy_ms,
        "launches": kernel_launches(lambda: group_amax(groups)),
    }


def time_model_30b() -> dict[str, Any]:
    """All NVFP4 weights of a Qwen3-30B-A3B packed on the GPU, each alone and all at once."""
    layers = [random_groups(LAYER_30B, "cuda") for _ in range(LAYERS_30B)]
    groups = [members for layer in layers for members in layer]
    amax = group_amax(groups)
    pairs = [
        (w, global_scale(values))
        for members, values in zip(groups, amax, strict=True)
        for w in members
    ]
    weights, scales = zip(*pairs, strict=True)

    def pack_all() -> list[PackedTensor]:
        return quantize_all(weights, scales, names=[""] * len(weights))

    return {
        "read_gib": sum(w.nbytes for w in weights) / BYTES_PER_GIB,
        "written_gib": sum(packed.nbytes for packed in pack_all()) / BYTES_PER_GIB,
        "pack_ms": wall_ms(lambda: [quantize(w, g) for w, g in pairs], rounds=10),
        "pack_all_ms": wall_ms(pack_all, rounds=10),
        "amax_ms": wall_ms(lambda: group_amax(groups), rounds=10),
    }


def time_nano(device: str) -> dict[str, Any]:
    """Fake quantization of every weight of a nano model, as one forward pass does it."""
    groups = [members for _ in range(NANO_LAYERS) for members in random_groups(LAYER_NANO, device)]
    amax = group_amax(groups)
    pairs = [
        (w, global_scale(values))
        for members, values in zip(groups, amax, strict=True)
        for w in members
    ]

    def forward() -> list[Tensor]:
        return [fake_quantize(w, g) for w, g in pairs]

    result: dict[str, Any] = {
        "device": device,
        "weights": len(pairs),
        "fake_quantize_ms": wall_ms(forward, device),
        "amax_ms": wall_ms(lambda: group_amax(groups), device),
    }
    if device == "cuda":
        result["fake_quantize_graph_ms"] = do_bench_cudagraph(forward, return_mode="median")
    return result
