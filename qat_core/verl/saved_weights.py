"""Weights that verl saves and restores between mini-batches, without losing updates.

`trainer_mode=separate_async` and `fully_async_policy` compute old log-probs under the weights of
the last sync: verl saves the current weights, restores older ones, computes, and restores the
current ones. In verl 0.9.1 updates since the last sync can be lost in three ways:

* It saves with `Tensor.cpu()`, no copy of a shard on the CPU (`param_offload=true`): older weights
  overwrite what was saved.
* With `reshard_after_forward=false` a forward pass leaves whole weights in the place of the shards,
  and verl writes into those.
* With `param_offload=true` the host does not wait for shards on their way to the CPU.
"""

from functools import wraps
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from verl.utils import fsdp_utils
from verl.utils.device import get_torch_device

_save = fsdp_utils.fsdp2_sharded_save_to_cpu
_load = fsdp_utils.fsdp2_sharded_load_from_cpu


@wraps(_save)
def _save_copies(model: nn.Module) -> Any:
    _let_shards_arrive(model)
    shards, spec = _save(model)
    for name, parameter in model.named_parameters():
        if parameter.device.type == "cpu":  # others were copied
            shard, own_spec = shards[name]
            shards[name] = shard.clone(), own_spec
    return shards, spec


@wraps(_load)
def _load_into_shards(model: nn.Module, *saved: Any) -> None:
    _let_shards_arrive(model)
    _load(model, *saved)


def _let_shards_arrive(model: nn.Module) -> None:
    reshard(model)
    get_torch_device().synchronize()


def reshard(model: nn.Module) -> None:
    """Puts shards back where a forward pass has left whole weights of FSDP2."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


fsdp_utils.fsdp2_sharded_save_to_cpu = _save_copies
fsdp_utils.fsdp2_sharded_load_from_cpu = _load_into_shards
