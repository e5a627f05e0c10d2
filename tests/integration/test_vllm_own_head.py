"""An output head with values of its own, which vLLM does not read where config.json says tied."""

import os
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

import vllm
from vllm.distributed import cleanup_dist_env_and_memory

from experiments.base.random_model import write_architecture
from experiments.benchmarks.architectures import ARCHITECTURES, engine_settings
from experiments.support.subprocess_call import call_in_subprocess
from qat_core.checkpoint.architecture import meta_model
from qat_core.planning.plan import bf16_plan, plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.vllm.bucketed_loader import BucketedLoader
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.rollout.vllm.switches import IN_PLACE_VARIABLE
from qat_core.weights.hub_names import HubNames
from qat_core.weights.stream import weight_stream
from qat_core.weights.transfer import transfer_tensors
from tests.nano_models import SETTINGS, said_to_be_tied, write_nano

pytestmark = pytest.mark.long

OWN_VALUES = r"lm_head\.weight: has values of its own, .*tie_word_embeddings"
RECIPE = Recipe.full()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("tied") / "model"
    write_nano("nano-dense", path, num_layers=1, tie_word_embeddings=True)
    yield path
    cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def tied(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def _untied(tied: nn.Module) -> nn.Module:
    model = deepcopy(tied)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flip(0))
    return model


@pytest.fixture(scope="module")
def untied(tied: nn.Module) -> nn.Module:
    return _untied(tied)


@pytest.fixture(scope="module")
def engine(folder: Path, tied: nn.Module) -> VllmEngine:
    started = VllmEngine(folder, plan(tied, RECIPE), **SETTINGS)
    started.sync(weight_stream(tied, plan(tied, RECIPE), RECIPE))
    return started


@pytest.fixture(scope="module")
def bf16_engine(folder: Path) -> VllmEngine:
    return VllmEngine(folder, **SETTINGS)


def _log_probs(engine: VllmEngine) -> Tensor:
    return torch.stack(engine.prompt_log_probs([[3, 14, 4, 17, 5, 9]]))


def _receive(worker: Any, tensors: list[tuple[str, Tensor]]) -> None:
    with BucketedLoader(worker) as loader:
        loader.take(tensors)


def _planned(model: nn.Module) -> list[tuple[str, Tensor]]:
    checked = plan(model, RECIPE)
    return list(transfer_tensors(checked, weight_stream(model, checked, RECIPE)))


def test_it_is_refused_before_vllm_starts(folder: Path, untied: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=OWN_VALUES):
        VllmEngine(folder, plan(untied, RECIPE), **SETTINGS)
    write_nano("nano-dense", tmp_path / "untied", num_layers=1)
    with pytest.raises(ValueError, match=OWN_VALUES):
        VllmEngine(said_to_be_tied(tmp_path / "untied", tmp_path / "tied"), **SETTINGS)


@pytest.mark.verl_table(
    "an output head with values of its own, where config.json has `tie_word_embeddings: true`",
    "refused, with `+nvfp4=off` too; where workers alone have the files, by the first sync",
)
def test_a_sync_with_it_replaces_nothing(engine: VllmEngine, untied: nn.Module) -> None:
    before = _log_probs(engine)
    checked = plan(untied, RECIPE)
    for expected in (checked, None):
        with pytest.raises(ValueError, match=OWN_VALUES):
            engine.sync(weight_stream(untied, checked, RECIPE), expected)
    with pytest.raises(ValueError, match=OWN_VALUES):
        engine.on_worker(_receive, _planned(untied))
    assert torch.equal(_log_probs(engine), before)


@pytest.mark.skipif(
    Version(vllm.__version__) >= Version("0.29"),
    reason="vLLM from 0.29 serves a head that a file has, tied or not",
)
def test_a_tensor_that_vllms_loader_puts_nowhere_is_named(
    engine: VllmEngine, tied: nn.Module, untied: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(HubNames, "refuse_own_values", lambda *_: None)
        message = r"lm_head\.weight: sent, but vLLM's Qwen3ForCausalLM puts it into no parameter"
        with pytest.raises(ValueError, match=message):
            engine.on_worker(_receive, _planned(untied))
    engine.sync(weight_stream(tied, plan(tied, RECIPE), RECIPE))


def test_streams_without_a_plan_may_bring_a_copy(
    bf16_engine: VllmEngine, tied: nn.Module, untied: nn.Module
) -> None:
    """As verl's own engine, which streams a state dict."""
    before = _log_probs(bf16_engine)
    sent = {name: tensor.clone() for name, tensor in tied.state_dict().items()}
    assert "lm_head.weight" in sent
    bf16_engine.on_worker(_receive, list(sent.items()))
    assert torch.equal(_log_probs(bf16_engine), before)
    with pytest.raises(ValueError, match=OWN_VALUES):
        bf16_engine.on_worker(_receive, list(untied.state_dict().items()))
    with pytest.raises(ValueError, match=OWN_VALUES):
        bf16_engine.sync(weight_stream(untied), bf16_plan(untied))


@pytest.mark.gpu
@pytest.mark.parametrize("in_place", [False, True])
def test_a_sync_on_a_gpu_with_it_replaces_nothing(in_place: bool, tmp_path: Path) -> None:
    written, is_equal, is_replaced = call_in_subprocess(_sync_on_a_gpu, in_place, str(tmp_path))
    assert written == in_place  # the way that is meant
    assert is_equal and is_replaced


def _sync_on_a_gpu(in_place: bool, folder: str) -> tuple[bool, bool, bool]:
    """Whether syncs go in place, a refused one left log-probs alone, and the next one did not."""
    os.environ[IN_PLACE_VARIABLE] = str(int(in_place))
    path = Path(folder) / "model"
    sizes = {"num_hidden_layers": 1, "tie_word_embeddings": True}
    write_architecture(ARCHITECTURES["dense"] | sizes, path)
    model = meta_model(path).to_empty(device="cuda")
    model.tie_weights()
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    own, planned = _untied(model), plan(model, RECIPE)
    engine = VllmEngine(path, planned, load_format="dummy", **engine_settings("cuda", 4))
    engine.sync(weight_stream(model, planned, RECIPE), planned)
    before = _log_probs(engine)
    checked = plan(own, RECIPE)
    for expected in (checked, None):
        with pytest.raises(ValueError, match=OWN_VALUES):
            engine.sync(weight_stream(own, checked, RECIPE), expected)
    is_equal = torch.equal(_log_probs(engine), before)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
    engine.sync(weight_stream(model, planned, RECIPE), planned)
    is_replaced = not torch.equal(_log_probs(engine), before)
    return bool(engine.on_worker(_targets)), is_equal, is_replaced


def _targets(worker: Any) -> set[str]:
    return set(getattr(worker, "qat_core_targets", ()))
