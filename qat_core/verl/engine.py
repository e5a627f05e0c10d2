"""verl's FSDP2 engine with NVFP4, for the actors that `+nvfp4=w4a16` configures.

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
from verl.utils.device import get_device_id, get_device_name, get_vendor
from verl.workers.config import QATEngineConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.rollout.base import _ROLLOUT_REGISTRY

import qat_core.verl.rotary
from qat_core.checkpoint.load import require_whole
from qat_core.planning.plan import QuantPlan, plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.vllm.switches import COVERAGE_VARIABLE
from qat_core.training.preparation import prepare, state_of
from qat_core.verl import compat
from qat_core.verl.configuration import to_recipe
from qat_core.verl.routing_replay import ReplayEngine
from qat_core.verl.rules import require_switches
from qat_core.verl.saved_weights import reshard
from qat_core.weights.coverage import coverage
from qat_core.weights.stream import weight_stream
from qat_core.weights.transfer import transfer_tensors

compat.require_supported()
# its backward pass gives NaN: see `experiments.rl.policy.ATTENTION`
torch.backends.cuda.enable_cudnn_sdp(False)
# by name: the adapter imports vLLM, which not every process needs
_ROLLOUT_REGISTRY["vllm", "async"] = "qat_core.verl.adapter.OwnSocketAdapter"
if get_device_name() == "cpu":
    import qat_core.verl.cpu_engine
    import qat_core.verl.cpu_transport  # noqa: F401  both register themselves


@dataclass
class NvFp4Config(QATEngineConfig):  # type: ignore[misc]
    """verl's QAT settings with the scale policies of `qat_core.planning.recipe.Recipe`.

    Making one imports this module, and so registers its engine, in any process that reads them.

    Attributes:
        enable: to verl's own code always off, whatever was set: its QAT must not act too.
        nvfp4: what `enable` was set to; False is BF16 in training and rollouts.
        train: train fake-quantized; rollouts are in NVFP4 either way.
    """

    train: bool = True
    scale_policy: str = "pow2"
    block_scale_method: str = "max"
    nvfp4: bool = False

    def __post_init__(self) -> None:
        require_switches(self)
        object.__setattr__(self, "nvfp4", self.enable)  # verl's configurations are frozen
        object.__setattr__(self, "enable", False)


# verl looks for the engine of a vendor first: this one takes the place of its own for "fsdp2"
@EngineRegistry.register("language_model", "fsdp2", ["cuda", "cpu"], vendor=get_vendor())
class NvFp4Engine(ReplayEngine):
    """FSDP2 actor that trains and streams NVFP4 weights."""

    plan: QuantPlan
    _recipe: Recipe

    def __new__(cls, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> Any:
        """BF16 where NVFP4 was not asked for; verl's own engine for reference policies."""
        if engine_config.forward_only:
            return FSDPEngineWithLMHead(model_config, engine_config, *args, **kwargs)
        if getattr(engine_config.qat, "nvfp4", False):
            return super().__new__(cls)
        kind = FSDPEngineWithLMHead
        if engine_config.router_replay.mode != "disabled":
            kind = ReplayEngine
        return kind(model_config, engine_config, *args, **kwargs)

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_config, engine_config, *args, **kwargs)
        if model_config.lora_rank > 0:
            raise ValueError("actor_rollout_ref.model.lora_rank: no LoRA with NVFP4; set it to 0")
        self._trains_rounded: bool = engine_config.qat.train
        self._recipe = to_recipe(engine_config.qat, engine_config.qat.ignore_patterns)

    def _build_module(self) -> nn.Module:
        """The model before it is sharded; on all ranks but the first it may be meta."""
        module: nn.Module = super()._build_module()
        folder = Path(self.model_config.local_path)
        has_files = any(folder.glob("*.safetensors"))  # not where a benchmark draws its weights
        if self.rank == 0 and has_files and type(module).__module__.startswith("transformers."):
            require_whole(folder)  # verl trains on with what transformers fills at random
        if self._trains_rounded:
            self.plan = prepare(module, self._recipe, allow_meta=True)
        else:
            self.plan = plan(module, self._recipe)
        return module

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """verl offloads or fetches; packed shards of offloaded weights would stay on the GPU.

        They go first: offloading ends with giving free memory back, which vLLM then has.
        """
        if device == "cpu" and model and self._trains_rounded:
            state = state_of(self.module)  # also where FSDP2 shows gathered weights
            assert state is not None
            state.packed_shards.clear()
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)

    def get_per_tensor_param(
        self, **_: Any
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Packed weights for the rollout workers, as verl's transport takes them."""
        reshard(self.module)  # after steps that train the critic alone
        self._require_coverage()
        device = torch.device(get_device_id())
        stream = weight_stream(self.module, self.plan, self._recipe, device)
        return transfer_tensors(self.plan, stream), None

    def _require_coverage(self) -> None:
        """The receiver checks that it serves what the plan packs; here, that training rounds it."""
        rows = coverage(self.module, self.plan, self.plan.quantized, qat=self._trains_rounded)
        path = os.environ.get(COVERAGE_VARIABLE)
        if path and self.rank == 0:
            Path(path).write_text(json.dumps(rows))
