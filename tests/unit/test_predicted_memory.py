"""Weight memory from shapes against real models and the published figures."""

import json
from math import ceil, log2

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.runs.manifest import read_manifest
from experiments.study.schema import ROOT
from qat_core.planning.predicted_memory import (
    VLLM_VOCABULARY_MULTIPLE,
    Precision,
    predict_offloaded_memory_gib,
    predict_training_memory_gib,
    predict_weight_memory_gib,
    weight_shapes,
)
from qat_core.units import BYTES_PER_GIB
from tests.tiny_models import SIZES

TINY = SIZES | {"head_dim": 32, "vocab_size": 80}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"model_type": "qwen3", **TINY}, id="qwen3"),
        pytest.param({"model_type": "qwen3", **TINY, "tie_word_embeddings": True}, id="tied"),
        pytest.param({"model_type": "qwen3_moe", **TINY, **MOE}, id="qwen3-moe"),
        pytest.param({"model_type": "qwen2", **TINY, "head_dim": 16}, id="qwen2"),
        pytest.param({"model_type": "llama", **TINY, "head_dim": 16}, id="llama"),
        pytest.param({"model_type": "qwen3", **TINY, "attention_bias": True}, id="bias"),
        pytest.param({"model_type": "qwen3", **TINY, "num_key_value_heads": None}, id="null"),
    ],
)
def test_shapes_equal_those_of_the_real_model(config: dict, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    real = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert weight_shapes(config) == real
    assert weight_shapes(model.config.to_dict()) == real, "as transformers saves it"


@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize(
    ("arm", "precision"), [("bf16", "bf16"), ("nvfp4-qat", "full"), ("nvfp4-qat-ffn", "ffn")]
)
def test_with_padding_it_is_what_vllm_was_measured_to_hold(
    model: str, arm: str, precision: Precision
) -> None:
    run = f"verl-gpu/nano-{model}-gpu_{arm}_seed0"
    memory = read_manifest(ROOT / "experiments" / "records" / run, "a record").memory
    config = json.loads((ROOT / "experiments" / "models" / f"nano-{model}.json").read_text())
    predicted = predict_weight_memory_gib(config, precision, VLLM_VOCABULARY_MULTIPLE)
    # BF16 to the byte; vLLM keeps up to 420 bytes of global scales more than are packed
    surplus = memory.measured_gib - predicted
    assert 0 <= surplus * BYTES_PER_GIB <= (0 if arm == "bf16" else 420)
    assert predict_weight_memory_gib(config, precision) < 0.995 * memory.measured_gib


def test_vllm_pads_vocabularies_to_that_multiple() -> None:
    embedding = pytest.importorskip("vllm.model_executor.layers.vocab_parallel_embedding")
    assert embedding.DEFAULT_VOCAB_PADDING_SIZE == VLLM_VOCABULARY_MULTIPLE


def test_training_memory_is_that_of_a_real_optimizer() -> None:
    config = {"model_type": "qwen3", **TINY}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config, use_cache=False), dtype=torch.float32
    )
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(1, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    moments = [it[key] for it in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    held = sum(t.nbytes for p in model.parameters() for t in (p, p.grad))
    held += sum(moment.nbytes for moment in moments)
    held += sum(p.nbytes for p in model.parameters())  # roots of the second moments
    assert predict_training_memory_gib(config, 1, 4) == pytest.approx(held / 2**30)
    assert predict_training_memory_gib(config, 4, 2) == pytest.approx(held / 8 / 2**30)
    assert predict_offloaded_memory_gib(config, 1, 4) == _pinned_gib(model, 1)
    assert predict_offloaded_memory_gib(config, 3, 4) == _pinned_gib(model, 3)


def _pinned_gib(model: nn.Module, gpus: int) -> float:
    """Weights and both moments, a block of pinned memory for each rank's part of each."""
    parts = [part for weight in model.parameters() for part in weight.chunk(gpus)]
    return 3 * sum(2 ** ceil(log2(part.nbytes)) for part in parts) / 2**30


def test_unknown_architecture_is_named() -> None:
    with pytest.raises(ValueError, match="model_type: gpt2"):
        weight_shapes({"model_type": "gpt2"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_hidden_layers": 0},
            "no linear or expert weight to quantize; use the bf16 arm alone",
        ),
        ({"hidden_size": 40}, r"0\.self_attn\.q_proj\.weight: input size 40 is not .*; change the"),
    ],
)
def test_what_cannot_be_packed_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict_weight_memory_gib({"model_type": "qwen3", **TINY} | change, "full")
