"""Forward operators whose bits are vLLM 0.24's on Hopper, and PyTorch's stand-ins for a CPU.

Products are not among them: cuBLAS and PyTorch's grouped product add along K in one order, as
vLLM's and Humming's batch-invariant kernels do, if no sum is split (`forbid_split_sums`) but those
that both sides cut in two (`slices.py`). Weights that are exact in BF16, as power-of-two global
scales make them, then give the same bits in all.

| operator | vLLM 0.24.0, below vllm/ |
|---|---|
| norm, silu_mul | ours, `kernels.py`, in the engine too |
| rotate | _custom_ops.py: rotary_embedding |
| norm_rotate | _custom_ops.py: fused_qk_norm_rope, which its compiler asks for, we by hand |
| attend | vllm_flash_attn: FlashAttention-3, one split |
| choose_experts | _custom_ops.py: topk_softmax |
| weighted_sum | model_executor/layers/fused_moe/moe_fused_mul_sum.py |
| log_probs, V2 | v1/worker/gpu/sample/logprob.py: compute_token_logprobs |
| log_probs, V1 | v1/sample/sampler.py: log_softmax in FP32, batch_invariant.py's |
"""

from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# logits in FP32 at a time: 512 MiB
BLOCK_ELEMENTS = 2**27
LARGEST_INT32 = 2**31 - 1
FEW_QUERIES = 64  # rows, of all heads that share keys: one warp group of FlashAttention-3


Heads = tuple[int, int, int]  # how many of queries, of keys and of values


class HeadNorms(NamedTuple):
    """Norms of each head: weights (D,) for queries and for keys."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float

    @classmethod
    def of(cls, attention: Any) -> "HeadNorms":
        """Those of an attention module, of transformers or of vLLM."""
        q_norm, k_norm = attention.q_norm, attention.k_norm
        return cls(q_norm.weight, k_norm.weight, q_norm.variance_epsilon)


class Operators(Protocol):
    """T rows of tokens, H heads of size D, P heads of keys and values, k experts of E a token."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension, BF16 (..., C) of BF16."""

    def rotate(self, positions_T: Tensor, q: Tensor, k: Tensor, table: Tensor, head: int) -> None:
        """Rotary embedding of q (T, H * D) and k (T, P * D), in place."""

    def norm_rotate(
        self, qkv: Tensor, heads: Heads, norms: HeadNorms, positions_T: Tensor, table: Tensor
    ) -> None:
        """RMSNorm of each head, then rotary embedding, rounded once, in place.

        qkv (T, heads * D), contiguous; values are left as they are.
        """

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, rounded once, (T, F) each."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Causal attention within sequences, (T, H, D), and its log-sum-exp."""

    def attend_backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], longest: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v; saved: q, k, v, out, log-sum-exp, starts."""

    def choose_experts(
        self, logits: Tensor, top_k: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        """FP32 weights and int32 numbers of experts, (T, k) each, of logits (T, E)."""

    def weighted_sum(self, rows: Tensor, weights: Tensor) -> Tensor:
        """BF16 (T, C) of rows (T, k, C) and FP32 weights (T, k)."""

    def log_probs(
        self, logits: Tensor, ids_T: Tensor, runner: int, vocabulary: int | None
    ) -> Tensor:
        """FP32 (T,) of BF16 logits (T, V), as vLLM's model runner 1 or 2 computes them.

        From `vocabulary` on logits are minus infinity.
        """


def longest_for(longest: int, head: int, heads_a_key: int) -> int:
    """What to tell FlashAttention-3 of the longest sequence, so that its blocks stay the same.

    Few queries of head size 64 have their keys in blocks of another size, added in another order.
    """
    return max(longest, FEW_QUERIES // heads_a_key + 1) if head == 64 else longest


@cache
def operators_for(device_type: str) -> Operators:
    """Those for tensors on "cuda" or "cpu"."""
    return _OnHopper() if device_type == "cuda" else _OnCpu()


class _OnHopper:
    """vLLM's own operators; none depends on its environment or on its batch-invariant mode."""

    def __init__(self) -> None:
        import vllm._custom_ops as custom
        from vllm.model_executor.layers import batch_invariant
        from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum
        from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        self._custom, self._invariant = custom, batch_invariant
        self._mul_sum, self._flash = moe_fused_mul_sum, flash_attn_varlen_func
        self._token_log_probs = compute_token_logprobs

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from qat_core.exact import kernels

        return kernels.norm(x, weight, eps)[0]

    def rotate(self, positions_T: Tensor, q: Tensor, k: Tensor, table: Tensor, head: int) -> None:
        self._custom.rotary_embedding(positions_T, q, k, head, table, True)

    def norm_rotate(
        self, qkv: Tensor, heads: Heads, norms: HeadNorms, positions_T: Tensor, table: Tensor
    ) -> None:
        q_weight, k_weight, eps = norms
        # one head a warp always: several, for many tokens, are another kernel
        fused = self._custom.fused_qk_norm_rope
        head = q_weight.numel()
        fused(qkv, *heads, head, eps, q_weight, k_weight, table, True, positions_T, 1)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        from qat_core.exact import kernels

        return kernels.silu_mul(gate, up)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        longest = longest_for(longest, q.shape[-1], q.shape[-2] // k.shape[-2])
        out, log_sum = self._flash(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=starts,
            max_seqlen_q=longest,
            cu_seqlens_k=starts,
            max_seqlen_k=longest,
            softmax_scale=scale,
            causal=True,
            window_size=[-1, -1],
            fa_version=3,
            num_splits=1,
            return_softmax_lse=True,
        )
        return out, log_sum

    def attend_backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], longest: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # PyTorch's FlashAttention-2: it needs only what FlashAttention-3's forward pass has given
        q, k, v, out, log_sum, starts = saved
        no_dropout = torch.zeros(2, dtype=torch.int64, device=q.device).view(torch.uint64)
        unused = torch.empty(0, dtype=torch.int64, device=q.device).view(torch.uint64)
        bounds = starts, starts, longest, longest
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, log_sum, *bounds, 0.0, True, no_dropout, unused, scale=scale
        )
        return grads

    def choose_experts(
        self, logits: Tensor, top_k: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        shape, device = (len(logits), top_k), logits.device
        weights = torch.empty(shape, dtype=torch.float32, device=device)
        ids, unused = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
        self._custom.topk_softmax(weights, ids, unused, logits, renormalize)
        return weights, ids

    def weighted_sum(self, rows: Tensor, weights: Tensor) -> Tensor:
        tokens = LARGEST_INT32 // (rows.shape[1] * rows.shape[2])  # whose places it can count
        pairs = zip(torch.split(rows, tokens), torch.split(weights, tokens), strict=True)
        out = [self._mul_sum(*pair) for pair in pairs]
        return out[0] if len(out) == 1 else torch.cat(out)

    def log_probs(
        self, logits: Tensor, ids_T: Tensor, runner: int, vocabulary: int | None
    ) -> Tensor:
        # of FP32 logits, as both samplers have them: Triton adds BF16 ones in another order
        one_block = self._log_probs_1 if runner == 1 else self._log_probs_2
        rows = max(1, BLOCK_ELEMENTS // logits.shape[-1])
        blocks = zip(torch.split(logits, rows), torch.split(ids_T, rows), strict=True)
        return torch.cat([one_block(_sampled(block, vocabulary), ids) for block, ids in blocks])

    def _log_probs_1(self, logits: Tensor, ids_T: Tensor) -> Tensor:
        found: Tensor = self._invariant.log_softmax(logits).gather(1, ids_T[:, None])
        return found[:, 0]

    def _log_probs_2(self, logits: Tensor, ids_T: Tensor) -> Tensor:
        found: Tensor = self._token_log_probs(logits, ids_T[:, None])
        return found[:, 0]


class _OnCpu:
    """PyTorch's, to test formulas and layers; no bits are promised."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        inverse = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return (x32 * inverse * weight.float()).to(x.dtype)

    def rotate(self, positions_T: Tensor, q: Tensor, k: Tensor, table: Tensor, head: int) -> None:
        cos, sin = table[positions_T].float()[:, None].chunk(2, dim=-1)
        for each in (q, k):
            first, second = each.view(len(each), -1, head).float().chunk(2, dim=-1)
            rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
            each.copy_(rotated.flatten(1))

    def norm_rotate(
        self, qkv: Tensor, heads: Heads, norms: HeadNorms, positions_T: Tensor, table: Tensor
    ) -> None:
        head = norms.q_weight.numel()
        q, k, _ = torch.split(qkv, [head * count for count in heads], dim=-1)
        for each, weight in ((q, norms.q_weight), (k, norms.k_weight)):
            by_head = each.view(len(each), -1, head)
            by_head.copy_(self.norm(by_head, weight, norms.eps))
        self.rotate(positions_T, q, k, table, head)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return (F.silu(gate.float()) * up.float()).to(gate.dtype)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        for rows in _sequences(starts):
            out[rows] = _attention(q[rows], k[rows], v[rows], scale)
        return out, starts  # no log-sum-exp: the backward pass computes all of it again

    def attend_backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], longest: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, _, starts = saved
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for rows in _sequences(starts):
            with torch.enable_grad():
                parts = [each[rows].detach().requires_grad_() for each in (q, k, v)]
                out = _attention(parts[0], parts[1], parts[2], scale)
            for whole, part in zip(grads, torch.autograd.grad(out, parts, grad[rows]), strict=True):
                whole[rows] = part
        return grads

    def choose_experts(
        self, logits: Tensor, top_k: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        weights, ids = logits.float().softmax(-1).topk(top_k, dim=-1)
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, ids.int()

    def weighted_sum(self, rows: Tensor, weights: Tensor) -> Tensor:
        return (rows.float() * weights[..., None]).sum(1).to(rows.dtype)

    def log_probs(
        self, logits: Tensor, ids_T: Tensor, runner: int, vocabulary: int | None
    ) -> Tensor:
        return _sampled(logits, vocabulary).log_softmax(-1).gather(1, ids_T[:, None])[:, 0]


def _sampled(logits: Tensor, vocabulary: int | None) -> Tensor:
    """BF16 logits (T, V) in FP32, minus infinity where no token is sampled."""
    logits = logits.float()
    if vocabulary is not None:
        logits[:, vocabulary:] = -torch.inf
    return logits


def _sequences(starts: Tensor) -> list[slice]:
    return [slice(*pair) for pair in pairwise(starts.tolist())]


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def forbid_split_sums() -> None:
    """Keep cuBLAS from splitting sums along K, whose parts would be added in another order.

    As vLLM's batch-invariant mode does on Hopper (`batch_invariant.py`); what it says in the
    environment too is for products of one row, which `products.whole` does not ask for.
    """
    if not torch.cuda.is_available():
        return
    matmul: Any = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.preferred_blas_library(backend="cublaslt")
