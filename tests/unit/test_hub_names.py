"""The hub's names are transformers' own, and fit its loader."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qat_core.checkpoint.architecture import require_loadable
from qat_core.weights.hub_names import HubNames
from tests.families import tiny_family

FAMILIES = ["mixtral", "olmoe", "deepseek_v3", "glm4_moe", "qwen3_moe", "gpt_oss", "llama4_text"]


@pytest.mark.parametrize("family", [*FAMILIES, "granitemoe", "nemotron_h", "lfm2", "llama"])
def test_pieces_are_what_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    model = tiny_family(family)
    names = HubNames(model)
    state = model.state_dict()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    pieces = dict(names.split(state.items()))
    for name, tensor in stored.items():
        assert torch.equal(tensor, pieces[name]), name
    assert stored.keys() <= pieces.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(names.join(name, tuple(tensor.shape), pieces.__getitem__), tensor), name


def test_mixtrals_experts_are_named_as_on_the_hub() -> None:
    names = HubNames(tiny_family("mixtral"))
    gate, up = names.pieces["model.layers.0.mlp.experts.gate_up_proj"][:2]
    assert {gate.name, up.name} <= {
        f"model.layers.0.block_sparse_moe.experts.{e}.w{i}.weight" for e in range(8) for i in (1, 3)
    }
    assert names.owner("model.layers.1.block_sparse_moe.gate.weight") == (
        "model.layers.1.mlp.gate.weight"
    )


def test_experts_that_a_file_holds_whole_are_not_cut() -> None:
    (piece,) = HubNames(tiny_family("gpt_oss")).pieces["model.layers.0.mlp.experts.gate_up_proj"]
    assert (piece.name, piece.expert) == ("model.layers.0.mlp.experts.gate_up_proj", None)


def test_a_form_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hub's names.*neither a whole tensor"):
        HubNames(tiny_family("hrm_text"))
    with pytest.raises(ValueError, match="Linear: not a model of transformers"):
        HubNames(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.popitem(), "missing keys"),
        (lambda t: t.update(extra=torch.empty(1, device="meta")), "unexpected keys: extra"),
        (lambda t: t.update({_FUSED: t[_FUSED].transpose(1, 2)}), "mismatched keys"),
    ],
    ids=["missing", "unknown", "transposed"],
)
def test_transformers_loader_is_asked(spoil, message: str) -> None:
    with torch.device("meta"):
        model = tiny_family("gpt_oss")
    stored = dict(HubNames(model).split(model.state_dict().items()))
    require_loadable(model, stored, "here")
    spoil(stored)
    with pytest.raises(ValueError, match=f"here: transformers finds {message}"):
        require_loadable(model, stored, "here")


_FUSED = "model.layers.0.mlp.experts.gate_up_proj"
