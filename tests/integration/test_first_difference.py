"""The first layer whose outputs differ between trainer and vLLM is named."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from experiments.support.subprocess_call import call_in_subprocess
from qat_core.checkpoint.load import load_model
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.rollout.vllm.first_difference import first_difference
from tests.nano_models import write_nano

TOKENS = list(range(3, 15))
CHANGED = "model.layers.1.mlp"


def _found(folder: Path) -> tuple[str | None, str | None]:
    engine = VllmEngine(folder, max_model_len=64, enforce_eager=True, kv_cache_memory_bytes=2**26)
    model = load_model(folder)
    with torch.no_grad():
        for layer in model.model.layers:  # what is left has equal bits on a CPU too
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    engine.sync(model.state_dict().items())
    same = first_difference(engine, model, TOKENS)
    with torch.no_grad():
        model.get_submodule(CHANGED).down_proj.weight.normal_()
    return same, first_difference(engine, model, TOKENS)


@pytest.mark.long
def test_the_changed_layer_is_named_and_equal_models_name_none(tmp_path: Path) -> None:
    write_nano("nano-dense", tmp_path / "base", num_layers=3)
    same, changed = call_in_subprocess(_found, tmp_path / "base")
    assert changed is not None
    assert changed.startswith(f"{CHANGED}: ")
    assert same is None
