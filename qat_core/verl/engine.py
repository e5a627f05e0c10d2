"""verl's FSDP2 engine with NVFP4: `actor_rollout_ref.actor.strategy=fsdp2_nvfp4`.

The actor trains fake-quantized weights and streams packed ones, shard by shard, to the rollouts.
verl's keys below `fsdp_config.qat` keep their meaning; verl's own QAT is never switched on.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from verl.utils.device import get_device_id
from verl.workers.config import QATEngineConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.rollout.base import _ROLLOUT_REGISTRY

from qat_core.coverage import coverage
from qat_core.options import BLOCK_SIZE
from qat_core.plan import QuantPlan, plan
from qat_core.preparation import prepare
from qat_core.recipe import Recipe
from qat_core.weights.stream import weight_stream
from qat_core.weights.transfer import transfer_tensors

# by name: the adapter imports vLLM, which not every process needs
_ROLLOUT_REGISTRY["vllm", "async"] = "qat_core.verl.adapter.OwnSocketAdapter"
# for BF16 on a CPU: verl registers its engine for GPUs and NPUs alone
EngineRegistry.register("language_model", "fsdp2", "cpu")(FSDPEngineWithLMHead)


@dataclass
class NvFp4Config(QATEngineConfig):  # type: ignore[misc]
    """verl's QAT settings with the scale policies of `qat_core.recipe.Recipe`.

    Attributes:
        enable: train fake-quantized; rollouts are in NVFP4 either way.
        scale: global scale, "pow2" or "amax".
        block_scale: "max", "four_over_six" or "mse".
    """

    scale: str = "pow2"
    block_scale: str = "max"


@EngineRegistry.register(model_type="language_model", backend="fsdp2_nvfp4", device=["cuda", "cpu"])
class NvFp4Engine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """FSDP2 actor that trains and streams NVFP4 weights."""

    plan: QuantPlan
    _recipe: Recipe

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        # The name that verl's engine knows, in a frozen config. Unneeded once FSDPEngine asks its
        # own class, not the strategy's name, whether it is FSDP2.
        object.__setattr__(engine_config, "strategy", "fsdp2")
        super().__init__(model_config, engine_config, *args, **kwargs)
        self._trains_rounded = engine_config.qat.enable and not engine_config.forward_only
        self._qat_enabled: bool = False  # verl's own QAT
        if self._is_lora:
            raise ValueError("actor_rollout_ref.model.lora_rank: no LoRA with NVFP4; set it to 0")
        if not engine_config.forward_only:
            self._recipe = _recipe(engine_config.qat)

    def _build_module(self) -> nn.Module:
        """The model before it is sharded; on all ranks but the first it may be meta."""
        module: nn.Module = super()._build_module()
        if self._trains_rounded:
            self.plan = prepare(module, self._recipe, allow_meta=True)
        elif not self.engine_config.forward_only:
            self.plan = plan(module, self._recipe)
        return module

    def get_per_tensor_param(
        self, **_: Any
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Packed weights for the rollout workers, as verl's transport takes them."""
        self._require_coverage()
        device = torch.device(get_device_id())
        stream = weight_stream(self.module, self.plan, self._recipe, device)
        return transfer_tensors(self.plan, stream), None

    def _require_coverage(self) -> None:
        """The receiver checks that it serves what the plan packs; here, that training rounds it."""
        checked = coverage(self.module, self.plan, self.plan.quantized, qat=self._trains_rounded)
        checked.check()
        path = os.environ.get("QAT_CORE_LEDGER")
        if path and self.rank == 0:
            Path(path).write_text(json.dumps(checked.as_dicts()))


def _recipe(config: QATEngineConfig) -> Recipe:
    """What the settings below `fsdp_config.qat` ask for.

    Raises:
        ValueError: a setting that this engine does not serve.
    """
    if not isinstance(config, NvFp4Config):
        raise ValueError("actor.fsdp_config.qat: add +nvfp4=w4a16 to the command line")
    if config.group_size != BLOCK_SIZE:
        raise ValueError(f"actor.fsdp_config.qat.group_size: {config.group_size}; use {BLOCK_SIZE}")
    if config.quantization_config_path is not None:
        raise ValueError(
            "actor.fsdp_config.qat.quantization_config_path: not read; use ignore_patterns"
        )
    return Recipe(
        mode=config.mode,
        scale_policy=config.scale,
        block_scale_method=config.block_scale,
        ignore=tuple(config.ignore_patterns),
    )
