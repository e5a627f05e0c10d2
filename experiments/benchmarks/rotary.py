"""What do log-probs lose where rotary frequencies are rounded to BF16, as verl's actors had them?

    python -m experiments.benchmarks.rotary RECORD.json MODEL [MODEL ...] [--tokens 512]

MODEL is the folder of a checkpoint, or a config.json whose shape gets random weights. All is in
BF16 on the CPU: a model as transformers loads it against the same model with rounded frequencies,
which is what `model.to(torch.bfloat16)` leaves; and, for scale, against itself with other attention
kernels. KL is exact, over the whole vocabulary, by position. A checkpoint reads what it has sampled
itself, random weights read random tokens.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.runs.provenance import origin
from experiments.support.cli import run_cli
from experiments.support.json_files import read_json, write_json
from qat_core.arguments import positive_int
from qat_core.checkpoint.load import load_model
from qat_core.doctor.numerics import variant

SEQUENCES = 4  # of a checkpoint; one of random weights
SLICES = 4  # of the positions


@torch.no_grad()
def measure(source: Path, num_tokens: int) -> dict[str, Any]:
    """KL of one model by slices of its positions."""
    torch.manual_seed(0)
    random = source.suffix == ".json"
    if random:
        config = AutoConfig.for_model(**read_json(source))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        ids = torch.randint(config.vocab_size, (1, num_tokens))
    else:
        model = load_model(source).eval()
        start = torch.full((SEQUENCES, 1), model.config.bos_token_id or 0)
        length = {"min_new_tokens": num_tokens - 1, "max_new_tokens": num_tokens - 1}
        ids = model.generate(start, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **length)
    exact = _log_probs(model, ids)
    with variant(model, norm="trainer", rope="bf16"):
        rounded = _kl(exact, _log_probs(model, ids))
    model.set_attn_implementation("eager")
    return {
        "model": source.stem,
        "layers": model.config.num_hidden_layers,
        "random_weights": random,
        "sequences": len(ids),
        "tokens": ids.numel(),
        "rounded_kl": rounded,
        "other_kernels_kl": _kl(exact, _log_probs(model, ids)),
    }


def _log_probs(model: Any, ids: Tensor) -> Tensor:
    """FP32 (sequences, tokens, vocabulary)."""
    log_probs: Tensor = model(ids, use_cache=False).logits.float().log_softmax(-1)
    return log_probs


def _kl(exact: Tensor, other: Tensor) -> dict[str, Any]:
    """Nats a token: of all, and of each slice of the positions."""
    by_position = (exact.exp() * (exact - other)).sum(-1).mean(0)
    slices = [float(part.mean()) for part in by_position.chunk(SLICES)]
    return {"mean": float(by_position.mean()), "slices": slices}


def main() -> None:
    """Measures each model and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--tokens", type=positive_int, default=512, help="of a sequence")
    arguments = parser.parse_args()
    found = [measure(source, arguments.tokens) for source in arguments.models]
    Console().print_json(data=found)
    record = {"benchmark": "rotary", **origin("cpu"), "slices": SLICES, "models": found}
    write_json(arguments.record, record)


if __name__ == "__main__":
    run_cli(main)
