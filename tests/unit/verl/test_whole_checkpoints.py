"""verl's actor starts from what its checkpoint holds, not from what transformers fills in."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from qat_core.checkpoint.load import load_model
from qat_core.planning.recipe import Recipe
from qat_core.verl.engine import NvFp4Engine, ReplayEngine


def test_an_actor_of_a_checkpoint_that_lacks_a_weight_is_refused(
    nano_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(nano_dir, tmp_path / "model")
    model = load_model(folder)
    monkeypatch.setattr(ReplayEngine, "_build_module", lambda _: model)
    engine = object.__new__(NvFp4Engine)
    engine.model_config, engine.rank = SimpleNamespace(local_path=str(folder)), 0
    engine._recipe, engine._trains_rounded = Recipe.full(), False
    assert engine._build_module() is model
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"/model: .*missing keys: lm_head.weight"):
        engine._build_module()
