"""What the exact mode is tried on: models, engines and trainers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.benchmarks.architectures import DENSE, MOE, read_architecture
from qat_core.options import ScalePolicy

STATES = (0, 1, 20)  # optimizer steps
BATCHES = (1, 7, 32, 64, 257)
HEAD_64 = {"head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 4}
PADDED = {"vocab_size": 8190}  # by vLLM, to a multiple of 64


@dataclass(frozen=True)
class Case:
    """A model, an engine and a trainer."""

    config: dict[str, Any]
    packed: bool = True  # rollouts in NVFP4, and training rounded
    exact_engine: bool = True
    exact_trainer: bool = True
    graphs: bool = True  # CUDA graphs of decoding and of prefill up to 1,024 tokens
    scale_policy: ScalePolicy = "pow2"
    is_norm_repaired: bool = True  # as `qat_core.rollout.vllm.exact.install` repairs it
    states: Sequence[int] = STATES
    batches: Sequence[int] = BATCHES
    passes: int = 3  # batches of the largest size
    ranks: int = 1  # of FSDP2; 1 is no FSDP2
    is_offloaded: bool = False  # FSDP2's shards lie in the CPU's memory
    # AdamW's; a model too large for them moves by its gradients' signs, which is AdamW's first step
    has_moments: bool = True
    engine_ranks: int = 1  # tensor parallel ones
    expert_parallel: bool = False  # they share out whole experts
    adds_as_ranks: bool = True  # the trainer adds what they share out as they do
    expected_zero: bool = True

    @property
    def num_gpus(self) -> int:
        """That the trainer's ranks or the engine's take."""
        return max(self.ranks, self.engine_ranks)


def cases() -> dict[str, Case]:
    """By name; controls leave one ingredient out."""
    qwen3_8b = read_architecture("qwen3-8b")
    qwen3_30b = read_architecture("qwen3-30b-a3b") | {"num_hidden_layers": 6}
    dense, moe = Case(DENSE), Case(MOE)
    once: dict[str, Any] = {"states": (0,), "batches": (64,), "passes": 1, "expected_zero": False}
    bf16 = replace(dense, packed=False)
    families = {
        f"{name}-{kind}": Case(config, packed=kind == "nvfp4", passes=1)
        for name, config in _families().items()
        for kind in ("nvfp4", "bf16")
    }
    qwen3_8b_layers = qwen3_8b | {"num_hidden_layers": 8}
    on_two: dict[str, Any] = {"states": (0, 1, 10), "passes": 1, "ranks": 2}
    half = read_architecture("qwen3-30b-a3b-half")
    two_ranks = {
        "two-ranks-qwen3-8b-8-layers-nvfp4": Case(qwen3_8b_layers, **on_two),
        "two-ranks-qwen3-8b-8-layers-bf16": Case(qwen3_8b_layers, packed=False, **on_two),
        "two-ranks-qwen3-30b-a3b-6-layers-nvfp4": Case(qwen3_30b, **on_two),
        "two-ranks-moe-128-nvfp4-offloaded": replace(moe, is_offloaded=True, **on_two),
        "two-ranks-qwen3-30b-a3b-half-nvfp4": Case(
            half, has_moments=False, batches=(1, 64, 257), **on_two
        ),
    }
    by_two: dict[str, Any] = {"passes": 1, "engine_ranks": 2}
    shared_out = {
        "tp-2-dense-128-nvfp4": replace(dense, **by_two),
        "tp-2-dense-64-bf16": Case(DENSE | HEAD_64 | PADDED, packed=False, **by_two),
        "tp-2-moe-128-nvfp4": replace(moe, **by_two),
        "tp-2-moe-128-bf16": replace(moe, packed=False, **by_two),
        "tp-2-qwen3-8b-8-layers-nvfp4": Case(qwen3_8b_layers, states=(0, 1), **by_two),
        "ep-2-moe-128-nvfp4": replace(moe, expert_parallel=True, **by_two),
        "ep-2-moe-128-bf16": replace(moe, packed=False, expert_parallel=True, **by_two),
    }
    added_as_one: dict[str, Any] = once | {"engine_ranks": 2, "adds_as_ranks": False}
    return {
        "dense-128-nvfp4": dense,
        "dense-64-nvfp4": Case(DENSE | HEAD_64 | PADDED),
        "moe-128-nvfp4": moe,
        "moe-64-nvfp4": Case(MOE | HEAD_64 | PADDED),
        "dense-128-bf16": bf16,
        "dense-64-bf16": Case(DENSE | HEAD_64 | PADDED, packed=False),
        "moe-128-bf16": replace(moe, packed=False),
        "dense-128-nvfp4-eager": replace(dense, graphs=False, passes=1),
        "moe-128-nvfp4-eager": replace(moe, graphs=False, passes=1),
        **families,
        "qwen3-8b-nvfp4": Case(qwen3_8b, states=(0, 1), passes=1),
        "qwen3-30b-a3b-6-layers-nvfp4": Case(qwen3_30b, states=(0, 1), passes=1),
        **two_ranks,
        **shared_out,
        "control-amax": replace(dense, scale_policy="amax", **once),
        "control-norm-not-repaired": replace(bf16, is_norm_repaired=False, **once),
        "control-not-batch-invariant": replace(bf16, exact_engine=False, **once),
        "control-marlin": replace(dense, exact_engine=False, **once),
        "control-tp-2-added-as-one": replace(dense, **added_as_one),
        "control-ep-2-added-as-one": replace(moe, expert_parallel=True, **added_as_one),
        "control-plain-transformers": replace(dense, exact_trainer=False, **once),
    }


def _families() -> dict[str, dict[str, Any]]:
    def of(kind: str, architecture: str, base: dict[str, Any] = DENSE, **more: Any) -> Any:
        return base | {"model_type": kind, "architectures": [architecture], **more}

    return {
        "llama": of("llama", "LlamaForCausalLM"),
        "mistral": of("mistral", "MistralForCausalLM", sliding_window=None),
        "qwen2": of("qwen2", "Qwen2ForCausalLM", num_attention_heads=8),  # hidden 1024, head 128
        "olmoe": of("olmoe", "OlmoeForCausalLM", MOE, num_attention_heads=8, norm_topk_prob=False),
    }
