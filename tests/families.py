"""A tiny model of every family of causal language models that transformers has."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

# Tested with vLLM's CPU build.
SERVED = (
    *("qwen3", "qwen3_moe", "qwen3_next", "qwen2", "qwen2_moe", "llama", "mistral", "mixtral"),
    *("phi3", "granite", "granitemoe", "ernie4_5", "olmoe", "olmo3", "deepseek_v3", "deepseek_v2"),
    *("glm4_moe", "gemma2", "gemma3_text", "cohere2", "nemotron", "exaone4", "arcee", "apertus"),
    *("afmoe", "seed_oss", "opt"),
)
SERVED_WITH_TORCHVISION = ("qwen3_5_text", "qwen3_5_moe_text")  # vLLM imports it for their images
SERVED_FROM_FILES = ("gpt_oss",)
# Ends of the names of what vLLM holds in FP32 next to BF16; the tests with vLLM compare them.
FP32_IN_VLLM = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), ("linear_attn.A_log",)),
    "afmoe": ("mlp.expert_bias", ".gate.weight"),
    "deepseek_v3": ("gate.e_score_correction_bias",),
    "glm4_moe": ("gate.e_score_correction_bias", "mlp.gate.weight"),
}
MAX_PARAMETERS = 16_000_000

# Set where a family's config has a field of that name: sizes that are multiples of 16.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "entity_vocab_size"), 128),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("embedding_size", "embed_dim", "attention_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "block_ff_dim", "dim_ff"), 96),
    **dict.fromkeys(("intermediate_size_mlp",), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "global_head_dim", "dim_head", "kv_channels"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "shared_intermediate_size"), 32),
    "moe_shared_expert_intermediate_size": 32,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("n_group", "first_k_dense_replace"), 1),
    "topk_group": 1,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    **dict.fromkeys(("sliding_window", "attention_window"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 16),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 16),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What a family's config needs besides.
OWN: dict[str, dict[str, Any]] = {
    "bigbird_pegasus": {"attention_type": "original_full"},
    "big_bird": {"attention_type": "original_full"},
    "deepseek_v2": {"num_key_value_heads": 4},
    # keys that vLLM reads and transformers does not; the hub's config.json has them
    "deepseek_v3": {"num_key_value_heads": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "dots1": {"n_shared_experts": 1},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "glm4_moe": {"head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "jetmoe": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "codegen": {"rotary_dim": 16},
    "gptj": {"rotary_dim": 16},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "lsh"]},
    "zamba": {"layer_types": ["mamba", "hybrid"], "num_hidden_layers": 2},
    "zamba2": {"layer_types": ["mamba", "hybrid"], "num_hidden_layers": 2},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "nemotron_h": {
        "layers_block_type": ["moe", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
    },
    # as the hub's; vLLM 0.28 fails on a CPU with AMX where all layers have a window
    "mixtral": {"sliding_window": None},
    "qwen2_moe": {"decoder_sparse_step": 1},
}


def tiny_family(model_type: str, seed: int = 0, **sizes: int) -> PreTrainedModel:
    """A model of the family with random weights, BF16, in training mode without dropout."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        tiny_config(model_type, **sizes), dtype=torch.bfloat16
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            uninitialised = not parameter.is_meta and not parameter.isfinite().all()
            if name.endswith("bias") or uninitialised:
                parameter.normal_(std=0.02)
    return model.train()


def sizes_for_vllm(model_type: str) -> dict[str, int]:
    """Sizes with heads as wide as vLLM's attention on a CPU needs them."""
    fields = AutoConfig.for_model(model_type).to_dict() | OWN.get(model_type, {})
    wanted = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4}
    wanted |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    wanted |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}
    return {name: size for name, size in wanted.items() if name in fields}


def num_parameters(model_type: str) -> int:
    """Of the family's tiny model, built without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.bfloat16)
    return int(model.num_parameters())


def tiny_config(model_type: str, **sizes: int) -> Any:
    """The family's config with the sizes above, or others: two layers, one of each kind it has."""
    fields = AutoConfig.for_model(model_type).to_dict()
    return AutoConfig.for_model(model_type, **_tiny(fields) | OWN.get(model_type, {}) | sizes)


def _tiny(fields: dict[str, Any]) -> dict[str, Any]:
    sizes = {name: size for name, size in SIZES.items() if name in fields}
    sizes |= {name: 0.0 for name in fields if "dropout" in name or "pdrop" in name}
    if fields.get("layer_types"):
        sizes["layer_types"] = [fields["layer_types"][0], fields["layer_types"][-1]]
    if fields.get("text_config"):
        sizes["text_config"] = fields["text_config"] | _tiny(fields["text_config"])
    return sizes
