"""Random weights of a model that is sharded already: each rank draws them for itself.

Each tensor has a generator of its own, seeded with the model's seed and the tensor's name, so that
any number of ranks starts from the same weights without sending any.
"""

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

SEED = "random_weights_seed"  # in config.json


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int, std: float, device: torch.device) -> None:
    """Moves a model to a device and fills it there; buffers keep their values.

    Args:
        model: on the meta device, but for its buffers.
        std: of matrices and embeddings, which are normal with mean 0; the rest, norms, is 1.
    """
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    for name, parameter in model.named_parameters():
        whole = draw(name, parameter.shape, seed, std, device).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            # without a source rank each keeps its part of what it drew
            mesh, placements = parameter.device_mesh, parameter.placements
            whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        parameter.copy_(whole)


def draw(name: str, shape: torch.Size, seed: int, std: float, device: torch.device) -> Tensor:
    """The BF16 values of one tensor."""
    values = torch.empty(shape, dtype=torch.bfloat16, device=device)
    if len(shape) < 2:
        return values.fill_(1.0)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:4], "little"))
    return values.normal_(0.0, std, generator=generator)
