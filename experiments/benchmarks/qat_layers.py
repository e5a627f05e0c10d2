"""Stacks of decoder layers by arm, for the benchmarks of training steps; `parameter` names them."""

import importlib.util
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModel

from experiments.benchmarks.architectures import read_architecture
from qat_core.exact import make_exact
from qat_core.exact.model import MODEL_RUNNERS
from qat_core.options import Keep
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare, state_of

QAT_ARMS: dict[str, Keep | None] = {"qat": None, "qat packed": "packed", "qat rounded": "rounded"}
EXACT = "exact "


def shard(model: nn.Module, layers: Iterable[nn.Module], **options: Any) -> None:
    """FSDP2 by layer, as verl does: computing in BF16, gradients reduced in FP32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*layers, model):
        fully_shard(module, mp_policy=policy, **options)


def layer_stack(shape: str, layers: int, device: str, dtype: torch.dtype) -> nn.Module:
    """Random decoder layers in training mode, the same for every call."""
    config = read_architecture(shape) | {"num_hidden_layers": layers, "vocab_size": 16}
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = AutoModel.from_config(AutoConfig.for_model(**config), dtype=dtype)
    return model.train()


def apply_arm(model: nn.Module, arm: str) -> Callable[[], None]:
    """Quantize `model` as the arm does; returns what to call when the weights have changed."""
    if arm.startswith(EXACT):
        changed = apply_arm(model, arm.removeprefix(EXACT))
        make_exact(model)
        return changed
    if arm in QAT_ARMS:
        prepare(model, Recipe(), keep=QAT_ARMS[arm])
        state = state_of(model)
        assert state is not None
        return state.weights.mark_all_written
    if arm == "verl":
        verl = verl_qat("core")
        verl.apply_qat(model, {"enable": True})
        verl.enable_qat_fuse(model)
        return lambda: verl.invalidate_all_scales(model)
    return lambda: None


def exact_arms(shape: str, *, sharded: bool = False) -> list[str]:
    """None of a family that was not proven to be exact."""
    if read_architecture(shape)["model_type"] not in MODEL_RUNNERS:
        return []
    return [EXACT + arm for arm in ("bf16", "qat", *(() if sharded else ("qat rounded",)))]


@cache
def arms(*, sharded: bool = False) -> list[str]:
    """The arms that can be measured here: verl needs its package on the path and a GPU."""
    has_verl = importlib.util.find_spec("verl") is not None and torch.cuda.is_available()
    qat = ["qat"] if sharded else QAT_ARMS  # sharded weights are kept packed anyway
    return ["bf16", *qat, *(["verl"] if has_verl else [])]


def verl_qat(name: str) -> ModuleType:
    """verl/utils/qat/NAME.py without the packages around it, which import Ray."""
    if "verl.utils.qat" not in sys.modules:
        spec = importlib.util.find_spec("verl")
        assert spec is not None and spec.submodule_search_locations
        root = Path(next(iter(spec.submodule_search_locations)))
        for room in ("verl", "verl.utils", "verl.utils.qat"):
            package = ModuleType(room)
            package.__path__ = [str(root.joinpath(*room.split(".")[1:]))]
            sys.modules[room] = package
        base = ModuleType("verl.base_config")
        base.BaseConfig = object  # type: ignore[attr-defined]
        sys.modules["verl.base_config"] = base
    return import_module(f"verl.utils.qat.{name}")


def step_inputs(
    model: nn.Module, sequences: int, tokens: int, device: str
) -> tuple[Tensor, Tensor]:
    """Input embeddings and output gradient, BF16 (sequences, tokens, hidden)."""
    hidden: Any = model.config.hidden_size  # type: ignore[union-attr]
    x = torch.randn(
        sequences, tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True
    )
    return x, torch.randn_like(x)
