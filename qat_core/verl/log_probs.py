"""verl's log-probs, of many tokens at once, where `external_lib` names this module.

`+attention=sdpa` does. Without flash-attn's cross entropy verl 0.9.1 calls PyTorch token by token.
Here the same operators run over blocks of tokens, with values and gradients that are equal to the
bit. Unneeded once verl does not loop over packed tokens.
"""

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from verl.utils import torch_functional

BLOCK = 2**24  # logits: a temporary copy in FP32 of 64 MiB, a hundred tokens of a large vocabulary

verls_own = torch_functional.logprobs_from_logits_v2


def log_probs_in_blocks(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probs (...) of the tokens `labels` (...) under `logits` (..., V), in BF16 or FP16.

    Others go to verl's own function, which has another formula for FP32: sums over several tokens
    at once would round differently there.
    """
    if logits.dtype not in (torch.bfloat16, torch.float16):
        return verls_own(logits, labels)  # type: ignore[no-any-return]
    rows = max(1, BLOCK // logits[0].numel())
    blocks = zip(torch.split(logits, rows), torch.split(labels, rows), strict=True)
    return torch.cat(
        [log_softmax(some, dim=-1).gather(-1, ids[..., None]).squeeze(-1) for some, ids in blocks]
    )


torch_functional.logprobs_from_logits_v2 = log_probs_in_blocks
