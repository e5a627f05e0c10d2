"""How many experts does a decoding step of an MoE with random weights read, by its prompts?

    python -m experiments.benchmarks.expert_load RECORD.json [--sequences 256]

The rollouts of `serving` in BF16 on the CPU, a layer at a time: prompts of 32 tokens and 16 new
ones, each as likely as any other, as random weights sample them. Counted are the experts that the
last token of any of the first so many sequences is routed to. Prompts are alike (of ten tokens in
different order, as `serving` had them up to commit 398a577) or random (as it has them since). With
alike prompts attention adds nearly the same to all sequences, layer by layer, so that their hidden
states, which choose the experts, become alike too. `--config` rehearses with a small model.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeDecoderLayer,
    Qwen3MoeRotaryEmbedding,
)

from experiments.benchmarks.serving import PROMPT_TOKENS, WEIGHT_STD, random_prompts
from experiments.runs.provenance import origin
from experiments.study.schema import ROOT
from experiments.support.cli import run_cli
from experiments.support.json_files import read_json, write_json
from qat_core.arguments import positive_int

NEW_TOKENS = 16
BATCHES = (1, 8, 32, 64, 128, 256)


def alike_prompts(count: int, num_tokens: int) -> list[list[int]]:
    """Ten tokens, from another one on in each prompt."""
    return [[5 + (row + column) % 10 for column in range(num_tokens)] for row in range(count)]


@torch.no_grad()
def measure(architecture: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """Of each layer: experts reached by so many sequences, and how alike these are.

    Args:
        architecture: what config.json holds.
    """
    config = AutoConfig.for_model(**architecture)
    config._attn_implementation, config._experts_implementation = "sdpa", "eager"
    torch.manual_seed(0)
    vocab_size, num_sequences = config.vocab_size, len(prompts)
    ids = torch.tensor(prompts)
    ids = torch.cat([ids, torch.randint(vocab_size, (num_sequences, NEW_TOKENS))], dim=1)
    embedding = torch.empty(vocab_size, config.hidden_size, dtype=torch.bfloat16).normal_(
        0, WEIGHT_STD
    )
    hidden = embedding[ids]
    del embedding
    angles = Qwen3MoeRotaryEmbedding(config)(hidden, torch.arange(ids.shape[1])[None])
    layers = []
    for index in range(config.num_hidden_layers):
        layer = _random_layer(config, index)
        chosen: list[Tensor] = []
        layer.mlp.gate.register_forward_hook(lambda *call, chosen=chosen: chosen.append(call[-1]))
        hidden = layer(hidden, position_embeddings=angles, attention_mask=None)
        experts = chosen[0][-1].view(*ids.shape, -1)[:, -1]
        layers.append(
            {
                "experts": {
                    str(n): len(set(experts[:n].flatten().tolist()))
                    for n in BATCHES
                    if n <= num_sequences
                },
                "cosine": _mean_cosine(hidden[:, -1].float()),
            }
        )
    return {"num_experts": config.num_experts, "layers": layers}


def _random_layer(config: Any, index: int) -> Any:
    with torch.device("meta"):
        layer = Qwen3MoeDecoderLayer(config, index)
    layer = layer.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in layer.parameters():
        parameter.normal_(0, WEIGHT_STD)
    return layer


def _mean_cosine(rows: Tensor) -> float:
    """Between any two different rows."""
    directions, count = normalize(rows, dim=-1), len(rows)
    return float(((directions @ directions.T).sum() - count) / (count * (count - 1)))


def main() -> None:
    """Counts with both kinds of prompts and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    config = ROOT / "experiments" / "models" / "qwen3-30b-a3b.json"
    parser.add_argument("--config", type=Path, default=config)
    parser.add_argument("--sequences", type=positive_int, default=256)
    arguments = parser.parse_args()
    count, architecture = (
        arguments.sequences,
        read_json(arguments.config, "name a config.json of a model"),
    )
    prompts = {
        "alike": alike_prompts(count, PROMPT_TOKENS),
        "random": random_prompts(count, PROMPT_TOKENS, architecture["vocab_size"], 0),
    }
    found = {kind: measure(architecture, rows) for kind, rows in prompts.items()}
    Console().print_json(data=found)
    setup = {"model": arguments.config.stem, "sequences": count, "new_tokens": NEW_TOKENS}
    write_json(
        arguments.record, {"benchmark": "expert_load", **origin("cpu"), **setup, "prompts": found}
    )


if __name__ == "__main__":
    run_cli(main)
