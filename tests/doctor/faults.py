"""Faults planted into a rollout engine or a trainer, each with the cause that has to be named.

    python -m tests.doctor.faults

writes the table of faults and of what the doctor named into docs/doctor.md.
"""

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from analysis.markdown import markdown_table
from experiments.study.schema import ROOT
from qat_core.doctor.diagnosis import Diagnosis
from qat_core.doctor.examine import Case, examine, load_model, random_prompts
from qat_core.doctor.numerics import variant
from qat_core.doctor.routing import routers
from qat_core.doctor.sampling import Sampling
from qat_core.doctor.subject import EagerSubject
from qat_core.doctor.weights import packed
from qat_core.planning.recipe import Recipe
from tests.nano_models import write_nano

Tamper = Callable[[EagerSubject, PreTrainedModel], None]
FULL = Recipe.full()
MODELS = ("nano-dense", "nano-moe")
ATTENTION = "model.layers.0.self_attn.o_proj.weight"
PAGE = ROOT / "docs" / "doctor.md"
BEGIN, END = "<!-- begin:faults -->", "<!-- end:faults -->"


@dataclass(frozen=True)
class Fault:
    """One planted fault."""

    what: str  # for the table
    cause: str | None  # what the doctor has to name, and nothing else; None for a healthy setting
    case: dict[str, Any] = field(default_factory=dict)  # differences from QAT with equal recipes
    tamper: Tamper | None = None  # what is done to engine and trainer
    models: tuple[str, ...] = MODELS
    other: tuple[str, ...] = ()  # options of the case that get the checkpoint of another step
    # a fault of the kernels that engine and trainer share
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def _always(model: PreTrainedModel, **kinds: str) -> None:
    """The model computes with another variant from now on."""
    kept = variant(model, **{"norm": "trainer", "rope": "trainer"} | kinds)
    kept.__enter__()
    model._kept_variant = kept  # else the generator would be closed and the variant undone


def _zero_row(subject: EagerSubject, trainer: PreTrainedModel) -> None:
    with torch.no_grad():
        subject.model.get_parameter(ATTENTION)[:8] = 0


def _forget_mask(model: PreTrainedModel, of_batches_above: int = 0) -> None:
    forward = model.forward

    def without_mask(*args: Any, attention_mask: Tensor, **kwargs: Any) -> Any:
        if len(attention_mask) > of_batches_above:
            attention_mask = torch.ones_like(attention_mask)
        return forward(*args, attention_mask=attention_mask, **kwargs)

    model.forward = without_mask


def _cache_in_fp8(model: PreTrainedModel) -> None:
    forward = model.forward

    def with_fp8_cache(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        out = forward(*args, past_key_values=past_key_values, **kwargs)
        for layer in past_key_values.layers if past_key_values else ():
            layer.keys, layer.values = _saturated(layer.keys), _saturated(layer.values)
        return out

    model.forward = with_fp8_cache


def _saturated(values: Tensor) -> Tensor:
    """As FP8 E4M3 with a scale that is too small: nothing above 7 / 16."""
    wide = (values.float() * 1024).clamp(-448, 448)
    return (wide.to(torch.float8_e4m3fn).float() / 1024).to(values.dtype)


def _pad_vocabulary(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    padded = nn.Linear(head.in_features, head.out_features + 16, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        padded.weight[: head.out_features] = head.weight
        padded.weight[head.out_features :] = 0
    model.set_output_embeddings(padded.requires_grad_(False))


def _unnormalized_experts(model: PreTrainedModel) -> None:
    for router in routers(model):
        router.norm_topk_prob = not router.norm_topk_prob


def _coarse_router(model: PreTrainedModel) -> None:
    for router in routers(model):
        router.forward = partial(_coarse, router, router.forward)


def _coarse(router: Any, forward: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """Experts chosen by logits rounded to whole numbers, weighed by the exact ones."""
    logits, _, _ = forward(hidden)
    _, ids = torch.topk(logits.float().round(), router.top_k, dim=-1)
    weights = logits.softmax(-1, dtype=torch.float32).gather(-1, ids)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights.to(logits.dtype), ids


def _dropout(model: PreTrainedModel) -> None:
    model.model.embed_tokens.register_forward_hook(
        lambda _module, _inputs, out: torch.nn.functional.dropout(out, 0.1)
    )


def _attention_that_depends_on_the_batch() -> AbstractContextManager[Any]:
    """More than 16 sequences are computed with values in FP8."""
    exact = nn.functional.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(query) > 16:
            value = value.to(torch.float8_e5m2).to(value.dtype)
        return exact(query, key, value, *args, **kwargs)

    return patch.object(nn.functional, "scaled_dot_product_attention", attention)


def engine(change: Callable[[PreTrainedModel], None]) -> Tamper:
    """A fault of the engine's model."""
    return lambda subject, trainer: change(subject.model)


def training(change: Callable[[PreTrainedModel], None]) -> Tamper:
    """A fault of the trainer's model."""
    return lambda subject, trainer: change(trainer)


def _sampled(**settings: float) -> dict[str, Any]:
    return {"sampling": Sampling(**settings)}


MOE = MODELS[1:]
FAULTS: dict[str, Fault] = {
    "healthy-bf16": Fault("none, BF16 on both sides", None, {"trained": None, "rolled_out": None}),
    "healthy-qat": Fault("none, QAT", None),
    "top_p": Fault("top_p 0.7", "top_p", _sampled(top_p=0.7)),
    "top_k": Fault("top_k 4", "top_k", _sampled(top_k=4)),
    "temperature": Fault("temperature 0.7", "temperature", _sampled(temperature=0.7)),
    "penalties": Fault("repetition_penalty 1.2", "penalties", _sampled(repetition_penalty=1.2)),
    "vocabulary": Fault(
        "16 rows of padding in the engine's softmax", "vocabulary", tamper=engine(_pad_vocabulary)
    ),
    "decoding": Fault("KV cache in FP8 that saturates", "decoding", tamper=engine(_cache_in_fp8)),
    "kernels": Fault("the engine attends to padding", "kernels", tamper=engine(_forget_mask)),
    "norm": Fault("RMSNorm in BF16", "norm", tamper=engine(partial(_always, norm="bf16"))),
    "rope": Fault(
        "frequencies of RoPE in BF16", "rope", tamper=engine(partial(_always, rope="bf16"))
    ),
    "routing_weights": Fault(
        "weights of the experts not normalized",
        "routing_weights",
        tamper=engine(_unnormalized_experts),
        models=MOE,
    ),
    "routing_ids": Fault(
        "experts chosen by rounded logits", "routing_ids", tamper=engine(_coarse_router), models=MOE
    ),
    "weights": Fault("8 rows of a matrix zeroed in the engine", "weights", tamper=_zero_row),
    "staleness": Fault("the engine serves the step before", "staleness", other=("served",)),
    "staleness-previous": Fault(
        "the same, with --previous", "staleness", other=("served", "previous")
    ),
    "scale": Fault(
        "rollouts by scale policy amax, training by pow2",
        "scale",
        {"rolled_out": Recipe.full(scale_policy="amax")},
    ),
    "scale-served": Fault(
        "the engine's weights were packed by amax",
        "scale",
        tamper=lambda subject, trainer: subject.sync(_packed_by_amax(trainer)),
    ),
    "quantization": Fault("NVFP4 rollouts, BF16 training", "quantization", {"trained": None}),
    "quantization-ffn": Fault(
        "NVFP4 rollouts, training rounds FFN only", "quantization", {"trained": Recipe.ffn()}
    ),
    "batch": Fault(
        "attention rounds to FP8 in batches of more than 16",
        "batch",
        around=_attention_that_depends_on_the_batch,
    ),
    "trainer-mask": Fault(
        "the trainer attends to padding",
        "trainer",
        tamper=training(partial(_forget_mask, of_batches_above=1)),
    ),
    "trainer": Fault("dropout in the trainer", "trainer", tamper=training(_dropout)),
}


def _packed_by_amax(trainer: PreTrainedModel) -> Any:
    plain = load_model(Path(trainer.name_or_path), "cpu")
    return packed(plain, Recipe.full(scale_policy="amax")).items()


def write_models(folder: Path, name: str) -> None:
    """A nano model of random weights in `now`, and in `other` as a step of AdamW may leave it."""
    write_nano(name, folder / "now", num_layers=2)
    model = load_model(folder / "now", "cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).bfloat16()
            parameter.add_(0.1 * parameter.float().std().nan_to_num() * noise)
    model.save_pretrained(folder / "other")
    for file in (folder / "now").glob("token*"):
        (folder / "other" / file.name).write_bytes(file.read_bytes())


def diagnosis_of(fault: Fault, folder: Path, num_prompts: int = 24) -> Diagnosis:
    """What the doctor finds in the models of `folder` with this fault."""
    case = Case(
        checkpoint=folder / "now",
        prompts=random_prompts(range(2, 18), num_prompts, seed=0),
        rolled_out=FULL,
        trained=FULL,
        max_new_tokens=24,
    )
    others = dict.fromkeys(fault.other, folder / "other")
    with fault.around():
        return examine(replace(case, **fault.case, **others), fault.tamper)


def named(diagnosis: Diagnosis) -> str:
    """As the table has it."""
    return ", ".join(finding.title for finding in diagnosis.named) or "none"


def table() -> str:
    """The faults, and the causes that the doctor named in each model, as Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for model in MODELS:
            write_models(root / model, model)
        return markdown_table(
            {"Planted": fault.what}
            | {m: named(diagnosis_of(fault, root / m)) if m in fault.models else "" for m in MODELS}
            for fault in FAULTS.values()
        )


def main() -> None:
    """Writes the table between its marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}")


if __name__ == "__main__":
    main()
