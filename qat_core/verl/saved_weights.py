"""Saved weights that stay as they were, where the live ones lie in the host's memory too.

`trainer_mode=separate_async` and `fully_async_policy` compute old log-probs under the weights of
the last sync: verl saves the current weights, restores older ones, computes, and restores the
current ones. verl 0.9.1 saves with `Tensor.cpu()`, which is no copy of a shard that lies on the
CPU, as with `param_offload=true`: older weights would overwrite what was saved, and every update
since the last sync would be lost. Unneeded once verl saves a copy.
"""

from functools import wraps
from typing import Any

from torch import nn
from verl.utils import fsdp_utils

_save = fsdp_utils.fsdp2_sharded_save_to_cpu


@wraps(_save)
def _save_copies(model: nn.Module) -> Any:
    shards, spec = _save(model)
    for name, parameter in model.named_parameters():
        if parameter.device.type == "cpu":  # others were copied
            shard, own_spec = shards[name]
            shards[name] = shard.clone(), own_spec
    return shards, spec


fsdp_utils.fsdp2_sharded_save_to_cpu = _save_copies
