"""vLLM 0.24 on Hopper, set up to serve bits that a trainer can compute too; loaded by the plugin.

On top of vLLM's batch-invariant mode:

* RMSNorm is ours, as vLLM's with a residual changes its blocks at 256 tokens (not from vLLM 0.27
  on, vllm 48391), and that without one copies what is not contiguous;
* Qwen3's heads are normed and rotated by the one kernel that vLLM's compiler would ask for, and
  SwiGLU is ours, as vLLM's has one block of threads a token;
* NVFP4 weights are multiplied by `few_rows`, or unpacked for cuBLAS, or by Humming's
  batch-invariant tiles (experts of many tokens), where vLLM has an emulation or refuses;
* BF16 linear layers are multiplied by cuBLAS, whose sums that mode does not split: the same bits as
  its Triton kernel, in less time; but long sums of row-parallel layers are cut in two;
* FlashAttention-3 is never told that queries are few (`operators.longest_for`);
* BF16 experts are added as NVFP4 ones are: rounded one by one, then in FP32;
* logits of a single sequence lie as those of many: see `logits`.
"""

import os
from typing import Any

from torch import Tensor
from vllm import envs
from vllm.model_executor.layers import activation, layernorm, linear, vocab_parallel_embedding
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.qwen3 import Qwen3Attention
from vllm.model_executor.models.qwen3_moe import Qwen3MoeAttention
from vllm.v1.attention.backends import flash_attn
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from qat_core.exact import kernels
from qat_core.exact.contract import of_ranks, of_vocabulary, shared
from qat_core.exact.functions import linear as product
from qat_core.exact.model import Ranks
from qat_core.exact.operators import HeadNorms, longest_for, operators_for
from qat_core.exact.slices import shared_linear
from qat_core.rollout.vllm.exact.bf16_experts import ExactBf16Experts
from qat_core.rollout.vllm.humming import experts as humming_experts
from qat_core.rollout.vllm.humming.linear import HummingLinearKernel
from qat_core.rollout.vllm.kernel_choice import use_for_linear

_attend = flash_attn.flash_attn_varlen_func
_logits = LogitsProcessor._get_logits
_bf16_experts = unquantized.backend_to_kernel_cls
_capture = GPUModelRunner._warmup_and_capture
_prepare_capture = cudagraph_utils.prepare_inputs_to_capture


def install() -> None:
    """Sets a vLLM process up, before its engine starts; a second call does nothing."""
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if linear.UnquantizedLinearMethod.apply is linear_layer:
        return
    layernorm.rms_norm_batch_invariant = norm
    linear.UnquantizedLinearMethod.apply = linear_layer
    vocab_parallel_embedding.linear_batch_invariant = product
    flash_attn.flash_attn_varlen_func = attend
    LogitsProcessor._get_logits = logits
    GPUModelRunner._warmup_and_capture = capture
    cudagraph_utils.prepare_inputs_to_capture = prepare_capture
    Qwen3Attention.forward = Qwen3MoeAttention.forward = attention_layer
    activation.SiluAndMul.forward_cuda = silu_mul
    for experts in (humming_experts.HummingExperts, ExactBf16Experts):
        experts.activation = silu_mul_of_experts
    use_for_linear(HummingLinearKernel)
    humming_experts.install()
    unquantized.backend_to_kernel_cls = bf16_experts


def bf16_experts(backend: Any) -> Any:
    """In place of the choice of a class for experts in BF16."""
    return ExactBf16Experts if backend.name == "TRITON" else _bf16_experts(backend)


def norm(input: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None) -> Any:
    """In place of vLLM's `rms_norm_batch_invariant`; of a residual, the sum too."""
    normed, summed = kernels.norm(input, weight, eps, residual)
    return normed if residual is None else (normed, summed)


def linear_layer(_: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """In place of the product of a BF16 linear layer."""
    is_shared = isinstance(layer, linear.RowParallelLinear)
    return (shared_linear if is_shared else product)(x, layer.weight, bias)


def attention_layer(self: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
    """In place of the forward pass of Qwen3's attention."""
    qkv, _ = self.qkv_proj(hidden_states)
    heads = self.num_heads, self.num_kv_heads, self.num_kv_heads
    table = self.rotary_emb._match_cos_sin_cache_dtype(qkv)
    operators_for("cuda").norm_rotate(qkv, heads, HeadNorms.of(self), positions, table)
    out = self.attn(*qkv.split([count * self.head_dim for count in heads], dim=-1))
    projected: Tensor = self.o_proj(out)[0]
    return projected


def silu_mul(_: Any, gate_up: Tensor) -> Tensor:
    """In place of `SiluAndMul.forward_cuda`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return kernels.silu_mul(gate, up)


def silu_mul_of_experts(_: Any, kind: MoEActivation, out: Tensor, gate_up: Tensor) -> None:
    """In place of the activation of experts."""
    assert kind == MoEActivation.SILU, f"the trainer refuses {kind}"
    gate, up = gate_up.chunk(2, dim=-1)
    kernels.silu_mul(gate, up, out)


def capture(self: Any, graph: Any, *, profile_seq_lens: int | None = None, **rest: Any) -> Any:
    """In place of vLLM's function, of model runner 1, when a graph is captured.

    It gives each sequence as many keys as the graph has tokens. Where those are more than a
    sequence may have, its row of the block table ends before them.
    """
    keys = profile_seq_lens or min(graph.num_tokens, self.max_model_len)
    return _capture(self, graph, profile_seq_lens=keys, **rest)


def prepare_capture(
    num_reqs: int,
    num_tokens: int,
    model_state: Any,
    buffers: Any,
    tables: Any,
    *rest: Any,
    **named: Any,
) -> Any:
    """The same of model runner 2, which gives the last sequence all that others leave over."""
    state = _prepare_capture(num_reqs, num_tokens, model_state, buffers, tables, *rest, **named)
    (table,) = tables.get_dummy_block_tables(1)
    buffers.seq_lens.clamp_(max=table.shape[1] * tables.kernel_block_sizes[0])
    return state


def attend(*, q: Tensor, k: Tensor, max_seqlen_q: int, **rest: Any) -> Any:
    """In place of FlashAttention's function, of keys in vLLM's pages."""
    longest = longest_for(max_seqlen_q, q.shape[-1], q.shape[-2] // k.shape[-2])
    return _attend(q=q, k=k, max_seqlen_q=longest, **rest)


def logits(self: Any, *args: Any, **rest: Any) -> Tensor | None:
    """In place of `LogitsProcessor._get_logits`, which cuts off a vocabulary's padding.

    PyTorch's copies of a cut row keep the distance to a next one with its padding, those of several
    rows do not. Triton adds a row in another order where that distance is a multiple of 16.
    """
    found: Tensor | None = _logits(self, *args, **rest)
    return found if found is None or len(found) > 1 else found.flatten().view(found.shape)


def contract(worker: Any) -> dict[str, str]:
    """What this worker has, see `qat_core.exact.contract`; called in its process."""
    config = worker.vllm_config
    parallel = config.parallel_config
    return {
        **shared(config.model_config.hf_config),
        "model runner": "2" if config.use_v2_model_runner else "1",
        "batch-invariant mode": str(bool(envs.VLLM_BATCH_INVARIANT)),
        "norm": _name(layernorm.rms_norm_batch_invariant),
        "linear layers": _name(linear.UnquantizedLinearMethod.apply),
        "attention layer": _name(Qwen3Attention.forward),
        "experts in BF16": _name(unquantized.backend_to_kernel_cls),
        "SwiGLU": _name(activation.SiluAndMul.forward_cuda),
        "attention": _name(flash_attn.flash_attn_varlen_func),
        "logits": _name(LogitsProcessor._get_logits),
        "attention backend": getattr(config.attention_config.backend, "name", "auto"),
        "FlashAttention": str(config.attention_config.flash_attn_version),
        "compilation mode": str(int(config.compilation_config.mode or 0)),
        "dtype": str(config.model_config.dtype),
        "KV cache": str(config.cache_config.cache_dtype),
        **of_ranks(Ranks(parallel.world_size, parallel.enable_expert_parallel)),
        **of_vocabulary(
            getattr(worker, "qat_core_vocabulary", None), config.model_config.hf_config
        ),
    }


def _name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"
