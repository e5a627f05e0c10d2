"""A training forward pass with the bits of vLLM's: trainer and rollout do not differ at all.

`make_exact` replaces the forward functions of a transformers model; `log_probs` ends the pass. What
vLLM has to serve for it is in `qat_core.rollout.vllm.exact.install`.

| file | what it has |
|---|---|
| operators.py | the forward operators, vLLM's own, and PyTorch's in their place on a CPU |
| backward.py | their gradients, as formulas in FP32; kernels.py has some as kernels |
| functions.py | both together, for autograd; once.py refuses second derivatives |
| layout.py | which rows of a batch are one sequence |
| products.py | matrix products of linear layers; slices.py cuts long sums in two |
| experts.py | routing and experts |
| halves.py | sums that two tensor parallel ranks of vLLM share out |
| count.py | how many log-probs differ in any bit: at every step none |
| contract.py | what decides bits, compared by trainer and engine |
| model.py | which modules compute with what; which models are refused |
"""

from qat_core.exact.count import require_equal
from qat_core.exact.functions import log_probs
from qat_core.exact.model import is_exact, make_exact, require_exact

__all__ = ["is_exact", "log_probs", "make_exact", "require_equal", "require_exact"]
