"""What decides bits, told by trainer and engine and compared at every sync.

The trainer says what it needs, the engine what it has, under the same names.
"""

import hashlib
import inspect
import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from qat_core.exact import experts, functions, halves, layout, model, operators, products, slices
from qat_core.training.preparation import state_of

CONTRACT_NAME = "qat_core:contract"  # of the tensor that carries it through a stream
ALIGNMENT = 4  # bytes, as for all tensors of a stream
PACKAGES = ("torch", "triton", "vllm")
# fields of a model's configuration that its operators read
FIELDS = (
    *("attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size"),
    *("max_position_embeddings", "mlp_bias", "model_type", "moe_intermediate_size"),
    *("norm_topk_prob", "num_attention_heads", "num_experts", "num_experts_per_tok"),
    *("num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "vocab_size"),
)
ENGINE = "qat_core.rollout.vllm.exact.install"
NEEDED = {
    "batch-invariant mode": "True",
    "norm": f"{ENGINE}.norm",
    "linear layers": f"{ENGINE}.linear_layer",
    "attention layer": f"{ENGINE}.attention_layer",
    "experts in BF16": f"{ENGINE}.bf16_experts",
    "SwiGLU": f"{ENGINE}.silu_mul",
    "attention": f"{ENGINE}.attend",
    "logits": f"{ENGINE}.logits",
    "attention backend": "FLASH_ATTN",
    "FlashAttention": "3",
    "compilation mode": "0",
    "dtype": "torch.bfloat16",
    "KV cache": "auto",
}


def shared(config: Any) -> dict[str, str]:
    """What trainer and engine have to agree on: versions, GPU, this code, the model's settings."""
    from qat_core.exact import kernels  # Triton, which a machine without a GPU may lack

    fields = {name: getattr(config, name, None) for name in FIELDS}
    modules = (experts, functions, halves, kernels, layout, model, operators, products, slices)
    code = "".join(map(inspect.getsource, modules))
    return {
        **{name: version(name) for name in PACKAGES},
        "GPU": "sm_{}{}".format(*torch.cuda.get_device_capability()),
        "qat_core.exact": hashlib.sha256(code.encode()).hexdigest()[:16],
        "model": json.dumps(fields, sort_keys=True, default=str),
        "model runner": str(model.model_runner(config)),
    }


def needed(exact_model: Any, vocabulary: int | None = None) -> dict[str, str]:
    """What the trainer of a model needs of its engine.

    Args:
        exact_model: see `qat_core.exact.make_exact`.
        vocabulary: what `log_probs` is told.

    Raises:
        ValueError: weights are rounded with scales that are no powers of two.
    """
    state = state_of(exact_model)
    if state is not None and state.policy != "pow2":
        raise ValueError(
            f"exact: scale_policy {state.policy}: a weight times its scale is rounded in training "
            "alone; use pow2"
        )
    return {
        **shared(exact_model.config),
        **NEEDED,
        **of_ranks(model.ranks_of(exact_model)),
        **of_vocabulary(vocabulary, exact_model.config),
    }


def of_ranks(ranks: model.Ranks) -> dict[str, str]:
    """The entries that both sides have of an engine's ranks."""
    return {"ranks": str(ranks.tensor_parallel), "expert parallel": str(ranks.expert_parallel)}


def of_vocabulary(vocabulary: int | None, config: Any) -> dict[str, str]:
    """The entry that both sides have of ids that are never sampled."""
    size = config.vocab_size
    return {"vocabulary": str(size if vocabulary is None else min(vocabulary, size))}


def require_kept(needed: Mapping[str, str], found: Mapping[str, str]) -> None:
    """ValueError that names each entry in which the engine differs from what is needed."""
    differing = [
        f"{name}: the trainer needs {needed.get(name)}, vLLM has {found.get(name)}"
        for name in sorted({*needed, *found})
        if needed.get(name) != found.get(name)
    ]
    if differing:
        raise ValueError(f"exact: {'; '.join(differing)}")


def to_tensor(contract: Mapping[str, str]) -> Tensor:
    """A contract as bytes of a stream."""
    text = json.dumps(contract)
    text += " " * (-len(text.encode()) % ALIGNMENT)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def from_tensor(tensor: Tensor) -> dict[str, str]:
    """Inverse of `to_tensor`."""
    contract: dict[str, str] = json.loads(bytes(tensor.cpu().tolist()))
    return contract
