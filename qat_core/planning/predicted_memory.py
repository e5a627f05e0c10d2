"""Memory of weights, served and trained, from shapes alone, before any GPU is rented.

Needs no torch. A BF16 weight takes 2 bytes. A packed one takes half a byte for its code and, for
each block of 16, one byte of block scale: 0.5625 bytes; its matrix adds one FP32 global scale.
"""

import math
from typing import Any, Literal

from qat_core.options import BLOCK_SIZE
from qat_core.units import BYTES_PER_GIB

Precision = Literal["bf16", "full", "ffn"]
Shapes = dict[str, tuple[int, ...]]

# what an optimizer step holds of each weight; the last only while it runs, not if it is fused
TRAINED = ("weight", "gradient", "first moment", "second moment", "root of the second moment")
OFFLOADED = ("weight", "first moment", "second moment")
VLLM_VOCABULARY_MULTIPLE = 64  # DEFAULT_VOCAB_PADDING_SIZE of its vocab_parallel_embedding.py
SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe")


def predict_weight_memory_gib(
    config: dict[str, Any], precision: Precision, vocabulary_multiple: int = 1
) -> float:
    """Weight memory in GiB of a model described by its Hugging Face config.json.

    Args:
        config: the content of config.json; ValueError for a `model_type` not in SUPPORTED.
        precision: "bf16"; "full": all linear and expert weights packed; "ffn": those outside
            attention. Embeddings, lm_head, router gates and norms stay in BF16.
        vocabulary_multiple: what an engine pads the vocabulary to a multiple of.

    Raises:
        ValueError: nothing can be packed, or an input size is not a multiple of 16.
    """
    vocabulary = math.ceil(config["vocab_size"] / vocabulary_multiple) * vocabulary_multiple
    shapes = weight_shapes(config | {"vocab_size": vocabulary})
    packed = {name: shape for name, shape in shapes.items() if _is_packed(name, precision)}
    if precision != "bf16" and not packed:
        raise ValueError("no linear or expert weight to quantize; use the bf16 arm alone")
    for name, shape in packed.items():
        if shape[-1] % BLOCK_SIZE:
            raise ValueError(
                f"{name}: input size {shape[-1]} is not a multiple of {BLOCK_SIZE}; change the "
                "model's sizes, or leave out the arms that quantize it"
            )
    kept_bytes = sum(2 * math.prod(shape) for name, shape in shapes.items() if name not in packed)
    packed_bytes = sum(
        math.prod(shape) * 9 // 16 + 4 * math.prod(shape[:-2]) for shape in packed.values()
    )
    return (kept_bytes + packed_bytes) / BYTES_PER_GIB


def predict_training_memory_gib(config: dict[str, Any], gpus: int, bytes_per_value: int) -> float:
    """Memory in GiB on each GPU of what FSDP2 shards, in a step of PyTorch's AdamW.

    That is weights, gradients, two moments, and the root of the second, which `foreach`, the
    default, takes of all weights at once (`fused` does not). Activations and the like depend on the
    batch. The bytes are of weights, and so of gradients and moments: 4 for FP32, 2 for BF16.
    """
    values = sum(map(math.prod, weight_shapes(config).values()))
    return len(TRAINED) * bytes_per_value * values / gpus / BYTES_PER_GIB


def predict_offloaded_memory_gib(config: dict[str, Any], gpus: int, bytes_per_value: int) -> float:
    """Memory in GiB of one host that holds what its GPUs have offloaded.

    verl offloads to pinned memory, each block of which PyTorch rounds up to a power of two
    (`CachingHostAllocator.h`; from 2.13 `pinned_max_round_threshold_mb` is a limit to that).
    """
    num_bytes = sum(
        1 << (bytes_per_value * rows * math.prod(rest) - 1).bit_length()
        for first, *rest in weight_shapes(config).values()
        for rows in _rows_of_ranks(first, gpus)
    )
    return len(OFFLOADED) * num_bytes / BYTES_PER_GIB


def _rows_of_ranks(rows: int, gpus: int) -> list[int]:
    """FSDP2 cuts the first dimension as `torch.chunk` does; of the last ranks some have no rows."""
    size = math.ceil(rows / gpus)
    return [size] * (rows // size) + ([rows % size] if rows % size else [])


def weight_shapes(config: dict[str, Any]) -> Shapes:
    """Shape of every parameter, by its Hugging Face name (experts fused, as in transformers 5)."""
    _refuse_unsupported(config)
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        block = {**_attention(config), **_feed_forward(config)}
        block |= {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {prefix + name: shape for name, shape in block.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def _refuse_unsupported(config: dict[str, Any]) -> None:
    if config["model_type"] not in SUPPORTED:
        raise ValueError(
            f"config.json: model_type: {config['model_type']} is not one of {', '.join(SUPPORTED)}"
        )
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            "config.json: mlp_only_layers, decoder_sparse_step: dense and MoE layers mixed are not "
            "supported; choose another model"
        )
    if config.get("mlp_bias"):
        raise ValueError("config.json: mlp_bias: not supported; choose another model")


def _attention(config: dict[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    query = heads * head_dim
    key = (config.get("num_key_value_heads") or heads) * head_dim
    outputs = {"q_proj": query, "k_proj": key, "v_proj": key}
    shapes: Shapes = {f"self_attn.{name}.weight": (n, hidden) for name, n in outputs.items()}
    if config["model_type"].startswith("qwen3"):
        shapes |= {f"self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    if config["model_type"] == "qwen2" or config.get("attention_bias"):
        shapes |= {f"self_attn.{name}.bias": (n,) for name, n in outputs.items()}
    if config["model_type"] != "qwen2" and config.get("attention_bias"):
        shapes["self_attn.o_proj.bias"] = (hidden,)
    return {**shapes, "self_attn.o_proj.weight": (hidden, query)}


def _feed_forward(config: dict[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    if config["model_type"] == "qwen3_moe":
        # transformers 5 writes the second name, checkpoints on the hub have the first
        experts = config.get("num_experts") or config["num_local_experts"]
        inner = config["moe_intermediate_size"]
        return {
            "mlp.gate.weight": (experts, hidden),
            "mlp.experts.gate_up_proj": (experts, 2 * inner, hidden),
            "mlp.experts.down_proj": (experts, hidden, inner),
        }
    inner = config["intermediate_size"]
    return {
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def _is_packed(name: str, precision: Precision) -> bool:
    attention = "self_attn." in name and "_proj.weight" in name
    feed_forward = "mlp." in name and not name.endswith("mlp.gate.weight")
    return precision != "bf16" and (feed_forward or (attention and precision == "full"))
