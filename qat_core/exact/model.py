"""Which modules of a transformers model compute exactly, and which models cannot.

Forward functions are replaced, one module at a time; parameters, names, classes and the order of
decoder layers stay transformers' own.
"""

from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qat_core.exact.experts import (
    experts_forward,
    experts_forward_by_halves,
    experts_forward_in_halves,
    router_forward,
)
from qat_core.exact.functions import attend, linear, norm, norm_rotate, rotate, silu_mul
from qat_core.exact.halves import linear_in_halves
from qat_core.exact.layout import Layouts
from qat_core.exact.operators import HeadNorms, forbid_split_sums
from qat_core.exact.slices import shared_linear
from qat_core.options import BLOCK_SIZE

ATTENTION = "qat_core_exact"
HEAD_SIZES = (64, 128)
# by `model_type`: vLLM 0.24's model runner, which computes log-probs in its own way
# (vllm/config/vllm.py, DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES)
MODEL_RUNNERS = {"qwen3": 2, "qwen3_moe": 1, "llama": 2, "mistral": 2, "qwen2": 1, "olmoe": 1}
SHARED_OUT = (".o_proj", ".down_proj")  # linear layers whose sums vLLM's ranks share out
OF_TWO_RANKS = ("qwen3", "qwen3_moe")  # models that were compared with two ranks


class Ranks(NamedTuple):
    """Of the engine, as the contract names them.

    Attributes:
        tensor_parallel: how many share out heads, inner sizes and vocabulary; 1 or 2.
        expert_parallel: they share out whole experts, and not each of them.
    """

    tensor_parallel: int = 1
    expert_parallel: bool = False


ONE_RANK = Ranks()


def make_exact(model: PreTrainedModel, ranks: Ranks = ONE_RANK) -> None:
    """Let a model compute what vLLM's exact engine computes, bit for bit, in place.

    Before or after `qat_core.prepare`, before `fully_shard`. cuBLAS is told not to split sums, in
    all of the process. Weights need to be in BF16 when they are computed with.

    Args:
        model: of transformers, for causal language modelling.
        ranks: of the engine: sums that they share out are added as they add them.

    Raises:
        ValueError: a model, a setting of its configuration, or ranks for it, that were not proven
            to be exact.
    """
    require_exact(model.config)
    require_ranks(model.config, ranks)
    forbid_split_sums()
    layouts = Layouts()
    for name, module in model.named_modules():
        forward = _forward_of(name, module)
        if forward is not None:
            module.forward = MethodType(forward, module)
            module._layouts = layouts
    model.register_forward_pre_hook(layouts.forget)
    if ranks.tensor_parallel > 1:
        _add_as_ranks(model, ranks)
    model._exact_ranks = ranks
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _never_called)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _keep_mask)
    model.config._attn_implementation = ATTENTION


def is_exact(model: nn.Module) -> bool:
    """Whether `make_exact` was called on the model."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == ATTENTION


def ranks_of(model: Any) -> Ranks:
    """Those that `make_exact` was called with."""
    ranks: Ranks = model._exact_ranks
    return ranks


def model_runner(config: Any) -> int:
    """Number of the model runner by which vLLM serves a model of this configuration."""
    return MODEL_RUNNERS[config.model_type]


def require_exact(config: Any) -> None:
    """ValueError that names what of a model's configuration was not proven to be exact."""
    kind = getattr(config, "model_type", None)
    if kind not in MODEL_RUNNERS:
        raise ValueError(f"exact: model_type {kind}: proven for {', '.join(MODEL_RUNNERS)} only")
    for key, (value, proven) in _settings(config).items():
        if value not in proven:
            raise ValueError(f"exact: {key} {value}: proven for {', '.join(map(str, proven))} only")


def require_ranks(config: Any, ranks: Ranks) -> None:
    """ValueError that names why ranks of an engine cannot serve the bits of a model."""
    count = ranks.tensor_parallel
    if count not in (1, 2):
        raise ValueError(
            f"exact: {count} tensor parallel ranks: use 1 or 2, as a sum of more than two has "
            "no one order"
        )
    if ranks.expert_parallel and not getattr(config, "num_experts", None):
        raise ValueError(f"exact: {config.model_type} has no experts that ranks could share out")
    if count > 1 and (reason := _why_not_shared(config, ranks)):
        raise ValueError(f"exact: {reason}; use 1 tensor parallel rank")


def _why_not_shared(config: Any, ranks: Ranks) -> str | None:
    """What of a model two ranks cannot share out, or were never compared with."""
    if config.model_type not in OF_TWO_RANKS:
        return f"{config.model_type}: two ranks were compared for {' and '.join(OF_TWO_RANKS)} only"
    if getattr(config, "attention_bias", False):
        return "attention_bias: a bias would be added to a sum that ranks share out"
    block = 2 * BLOCK_SIZE  # a rank's part of a sum is of whole blocks
    steps = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": block}
    steps |= {"num_experts": 2} if ranks.expert_parallel else {"moe_intermediate_size": block}
    for key, step in steps.items():
        if (size := getattr(config, key, None) or 0) % step:
            return f"{key} {size}: two ranks share out multiples of {step}"
    return None


def _add_as_ranks(model: PreTrainedModel, ranks: Ranks) -> None:
    """Forward functions of what two ranks add together."""
    of_experts = experts_forward_by_halves if ranks.expert_parallel else experts_forward_in_halves
    for name, module in model.named_modules():
        if name.endswith(SHARED_OUT):
            module.forward = MethodType(_linear_forward_in_halves, module)
        elif type(module).__name__.endswith("Experts"):
            module.forward = MethodType(of_experts, module)


def _settings(config: Any) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """What a configuration says, and what was proven."""
    rope = getattr(config, "rope_parameters", None) or {}
    types = set(getattr(config, "layer_types", None) or ["full_attention"])
    return {
        "head_dim": (_head_size(config), HEAD_SIZES),
        "hidden_act": (config.hidden_act, ("silu",)),
        "layer_types": (" and ".join(sorted(types)), ("full_attention",)),
        "sliding_window": (_window(config), (None,)),
        "attention_dropout": (getattr(config, "attention_dropout", 0), (0,)),
        "rope_parameters.rope_type": (rope.get("rope_type", "default"), ("default",)),
        "rope_parameters.partial_rotary_factor": (rope.get("partial_rotary_factor", 1), (1,)),
        "clip_qkv": (getattr(config, "clip_qkv", None), (None,)),
    }


def _head_size(config: Any) -> int:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head)


def _window(config: Any) -> int | None:
    is_used = getattr(config, "use_sliding_window", True)
    return getattr(config, "sliding_window", None) if is_used else None


def _forward_of(name: str, module: nn.Module) -> Any:
    """The exact forward function for a module of transformers' class, or None to keep its own."""
    if isinstance(module, nn.Linear):
        return _shared_linear_forward if name.endswith(SHARED_OUT) else _linear_forward
    kind = type(module).__name__
    return next((forward for end, forward in _BY_CLASS.items() if kind.endswith(end)), None)


def _linear_forward(self: Any, x: Tensor) -> Tensor:
    return linear(x, self.weight, self.bias)


def _shared_linear_forward(self: Any, x: Tensor) -> Tensor:
    return shared_linear(x, self.weight, self.bias)


def _linear_forward_in_halves(self: Any, x: Tensor) -> Tensor:
    return linear_in_halves(x, self.weight)


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return norm(hidden_states, self.weight, self.variance_epsilon)


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x)))
    return out


def _rotary_forward(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """In place of cosines and sines: their table and, for each row, where to look."""
    table = self.__dict__.get("_table")
    if table is None or table.device != x.device:
        table = self.__dict__["_table"] = rotary_table(self.config, x.device)
    _require_current(x.device)
    # vLLM's operators read positions densely, and check none; those of padding may be negative
    return table, position_ids.expand(x.shape[:2]).reshape(-1).clamp(min=0)


def _require_current(device: torch.device) -> None:
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(
            f"exact: the model is on {device}, and kernels go to the current device, another one: "
            f"call torch.cuda.set_device({device.index})"
        )


@torch.inference_mode(False)  # training reads it, too
def rotary_table(config: Any, device: torch.device) -> Tensor:
    """BF16 (positions, D): cosines, then sines, computed as vLLM does on the same device.

    vllm/model_executor/layers/rotary_embedding/base.py, `_compute_cos_sin_cache`.
    """
    head = _head_size(config)
    base = config.rope_parameters["rope_theta"]
    with torch.device(device):
        frequencies = 1.0 / (base ** (torch.arange(0, head, 2, dtype=torch.float) / head))
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float)
        angles = positions[:, None] * frequencies  # einsum is in BF16 under autocast
        return torch.cat((angles.cos(), angles.sin()), dim=-1).bfloat16()


def _attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of packed or padded sequences.

    Raises:
        ValueError: with a cache, a mask of another form, weights that are not in BF16, or a
            sequence longer than the rotary table.
    """
    if past_key_values is not None:
        raise ValueError("exact: needs use_cache=False; sample with the rollout engine")
    if hidden_states.dtype != torch.bfloat16:
        raise ValueError(
            f"exact: computes in bfloat16, got {hidden_states.dtype}: load the model with "
            "dtype=torch.bfloat16, or shard FP32 weights with param_dtype=torch.bfloat16"
        )
    if attention_mask is not None and attention_mask.ndim != 2:
        shape = tuple(attention_mask.shape)
        raise ValueError(f"exact: attention_mask: needs (sequences, tokens), got {shape}")
    table, positions_T = position_embeddings
    head, shape = self.head_dim, hidden_states.shape[:-1]
    layout = self._layouts.of(attention_mask, kwargs["position_ids"], shape)
    if layout.longest > len(table):
        raise ValueError(
            f"exact: a sequence of {layout.longest} tokens; max_position_embeddings is {len(table)}"
        )
    q, k, v = (
        project(hidden_states).view(len(positions_T), -1)
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    if _norms_heads(self):
        q, k = norm_rotate(q, k, HeadNorms.of(self), positions_T, table)
    else:
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, k, positions_T, table, head)
    q, k, v = (each.view(len(positions_T), -1, head) for each in (q, k, v))
    out = attend(q, k, v, layout, self.scaling)
    return self.o_proj(out.view(*shape, -1)), None


def _norms_heads(self: Any) -> bool:
    """Whether queries and keys are normed by themselves, not with all heads together."""
    return hasattr(self, "q_norm") and self.q_norm.weight.numel() == self.head_dim


def _keep_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    return attention_mask


def _never_called(*_: Any, **__: Any) -> Any:
    raise AssertionError("attention modules of an exact model have a forward function of ours")


_BY_CLASS = {
    "RMSNorm": _norm_forward,
    "RotaryEmbedding": _rotary_forward,
    "Attention": _attention_forward,
    "MLP": _mlp_forward,
    "TopKRouter": router_forward,
    "Experts": experts_forward,
}
