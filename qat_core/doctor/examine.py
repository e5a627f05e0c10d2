"""From a checkpoint to a diagnosis: start an engine, sample, score, probe."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from qat_core.checkpoint import load
from qat_core.checkpoint.architecture import meta_model
from qat_core.doctor.diagnosis import Diagnosis, diagnose
from qat_core.doctor.laboratory import Laboratory
from qat_core.doctor.sampling import Sampling
from qat_core.doctor.scoring import one_pass
from qat_core.doctor.subject import EagerSubject, Subject
from qat_core.doctor.weights import compare, served_stream
from qat_core.planning.plan import QuantPlan, plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.eager import EagerEngine
from qat_core.rollout.engine import require_known
from qat_core.rollout.start import EngineKind
from qat_core.training.preparation import prepare
from qat_core.weights.stream import weight_stream


@dataclass(frozen=True)
class Case:
    """What is examined."""

    checkpoint: Path  # BF16 checkpoint that the trainer holds, with tokenizer
    prompts: Sequence[Sequence[int]]
    rolled_out: Recipe | None = None  # what the engine holds in NVFP4; None serves BF16
    trained: Recipe | None = None  # what the trainer's forward pass rounds; None trains in BF16
    # checkpoint that the engine loads, BF16 or packed, instead of the trainer's
    served: Path | None = None
    # the trainer's checkpoint at the last sync but one, to tell what is stale
    previous: Path | None = None
    engine: EngineKind = "eager"
    device: str = "cpu"
    max_new_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    micro_batch: int = 8  # sequences of one forward pass of the trainer
    seed: int = 0


def load_model(folder: Path, device: str) -> PreTrainedModel:
    """The folder's model in BF16, without gradients; errors as `checkpoint.load.load_model`."""
    model: PreTrainedModel = load.load_model(folder).to(device)
    return model.eval().requires_grad_(False)


def examine(
    case: Case, tamper: Callable[[Subject, PreTrainedModel], None] | None = None
) -> Diagnosis:
    """Finds the causes of the mismatch of one case.

    `tamper` is called with engine and trainer before they sample and score: it plants faults.

    Raises:
        ValueError: a checkpoint, a recipe or the engine does not fit; the message says what to do.
    """
    previous = partial(load_model, case.previous, case.device) if case.previous else None
    _check_previous(case)
    model = load_model(case.checkpoint, case.device)
    require_known(case.prompts, int(model.config.vocab_size))
    packed = plan(model, case.rolled_out) if case.rolled_out else None
    subject = _start_subject(case, model, packed)
    stream = served_stream(case.served, case.rolled_out) if case.served else None
    subject.sync(stream or weight_stream(model, packed, case.rolled_out))
    trainer = load_model(case.checkpoint, case.device)
    if case.trained:
        prepare(trainer, case.trained)
    if tamper:
        tamper(subject, trainer)
    samples = subject.sample(case.prompts, case.max_new_tokens, case.sampling, case.seed)
    versions = compare(model, subject.weights(), case.rolled_out, case.trained, previous)
    trained_BT = one_pass(
        trainer,
        samples.rollouts,
        int(model.config.vocab_size),
        rows_at_once=case.micro_batch,
        whole=True,
    )
    del trainer
    reference = load_model(case.checkpoint, case.device)
    lab = Laboratory(
        subject, reference, versions, samples, case.sampling, trained_BT, case.micro_batch
    )
    return diagnose(lab)


def _start_subject(case: Case, model: PreTrainedModel, packed: QuantPlan | None) -> Subject:
    if case.engine == "eager":
        return EagerSubject(EagerEngine(case.checkpoint, case.device), int(model.config.vocab_size))
    from qat_core.doctor.vllm_subject import VllmSubject

    max_tokens = max(map(len, case.prompts)) + case.max_new_tokens
    return VllmSubject(case.checkpoint, case.device, packed, max_tokens)


def _check_previous(case: Case) -> None:
    """Before the work, as its weights are read only where something differs."""
    if case.previous is None:
        return
    load.full_precision_shards(case.previous)
    old, new = (
        {name: weight.shape for name, weight in meta_model(folder).named_parameters()}
        for folder in (case.previous, case.checkpoint)
    )
    if old != new:
        raise ValueError(
            f"{case.previous}: other weights or shapes than {case.checkpoint} has; name the "
            "trainer's checkpoint at the sync before"
        )


def random_prompts(vocabulary: Iterable[int], count: int, seed: int) -> list[list[int]]:
    """Prompts of 4 to 16 random tokens, for a checkpoint without prompts of its own."""
    known = torch.tensor(sorted(vocabulary))
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 17, (count,), generator=generator).tolist()
    return [
        known[torch.randint(len(known), (length,), generator=generator)].tolist()
        for length in lengths
    ]
