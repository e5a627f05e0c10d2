"""Trainers of `zero_mismatch`: one in this process, or FSDP2 over several ranks."""

import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from experiments.benchmarks.exact_cases import Case
from experiments.benchmarks.qat_layers import shard
from experiments.benchmarks.ranks import join_ranks
from experiments.support.signals import end_with_parent
from qat_core.checkpoint.load import load_model
from qat_core.exact import log_probs, make_exact
from qat_core.exact.contract import needed
from qat_core.exact.model import ONE_RANK, Ranks, model_runner
from qat_core.mismatch import k3
from qat_core.planning.recipe import Recipe
from qat_core.rollout.engine import Rollouts
from qat_core.training.preparation import prepare
from qat_core.weights.hub_names import Weight
from qat_core.weights.stream import weight_stream

TOKENS_AT_ONCE = 16_384  # of one forward pass
LEARNING_RATE = 1e-3


def recipe_of(case: Case) -> Recipe | None:
    """None for BF16."""
    return Recipe.full(scale_policy=case.scale_policy) if case.packed else None


class Trainer:
    """A model that is trained and that computes log-probs of sampled tokens again."""

    def __init__(self, case: Case, checkpoint: Path, device: str) -> None:
        model = load_model(checkpoint).to(device)
        if case.exact_trainer:
            ranks = Ranks(case.engine_ranks, case.expert_parallel)
            make_exact(model, ranks if case.adds_as_ranks else ONE_RANK)
        if recipe := recipe_of(case):
            prepare(model, recipe)
        if case.ranks > 1:
            model.float()
            model.gradient_checkpointing_enable({"use_reentrant": False})
            offload = CPUOffloadPolicy() if case.is_offloaded else OffloadPolicy()
            shard(model, model.model.layers, offload_policy=offload)
        self._model, self._device, self._has_moments = model, device, case.has_moments
        optimizer = torch.optim.AdamW if case.has_moments else torch.optim.SGD
        self._optimizer = optimizer(model.parameters(), lr=LEARNING_RATE)

    def needed(self) -> dict[str, str]:
        """The contract with an engine."""
        return needed(self._model)

    def train(self) -> None:
        """A step that moves weights about as far as a step of RL with a high learning rate."""
        ids = torch.randint(self._model.config.vocab_size, (8, 256), device=self._device)
        logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1]
        advantages = torch.randn(8, 1, device=self._device)
        found = log_probs(logits, ids[:, 1:], model_runner(self._model.config))
        loss = -(advantages * found).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if not self._has_moments:
            for weight in self._model.parameters():
                weight.grad.sign_()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """What a sync sends."""
        return weight_stream(self._model, device=self._device)

    @torch.no_grad()
    def compare(self, sampled: Rollouts) -> dict[str, Any]:
        """Tokens whose log-probs differ in any bit, packed; and how far."""
        sampled = sampled.to(self._device)
        theirs = sampled.log_probs[sampled.response_mask.bool()]
        ours = torch.cat([self._log_probs(sampled.select(rows)) for rows in _groups(sampled)])
        difference = ours.double() - theirs.double()
        return {
            "tokens": len(ours),
            "unequal": int((ours != theirs).sum()),
            "largest_difference": float(difference.abs().max()),
            "k3_kl": float(k3(difference).mean()),
        }

    def _log_probs(self, sampled: Rollouts) -> Tensor:
        """Of all response tokens, from one pass over the sequences laid one after the other."""
        mask_BT = sampled.attention_mask.bool()
        positions_BT = sampled.attention_mask.cumsum(-1) - 1
        is_response_BT = torch.zeros_like(mask_BT)
        is_response_BT[:, -sampled.response_mask.shape[1] :] = sampled.response_mask.bool()
        ids_T, is_response_T = sampled.input_ids[mask_BT], is_response_BT[mask_BT]
        before = is_response_T.nonzero()[:, 0] - 1
        logits = self._model(
            input_ids=ids_T[None],
            position_ids=positions_BT[mask_BT][None],
            use_cache=False,
            logits_to_keep=before,
        ).logits[0]
        return log_probs(logits, ids_T[before + 1], model_runner(self._model.config))


def _groups(sampled: Rollouts) -> Iterator[slice]:
    """Rows of at most TOKENS_AT_ONCE tokens."""
    lengths = sampled.attention_mask.sum(-1).tolist()
    first, tokens = 0, 0
    for row, length in enumerate(lengths):
        if tokens + length > TOKENS_AT_ONCE:
            yield slice(first, row)
            first, tokens = row, 0
        tokens += length
    yield slice(first, len(lengths))


class RankedTrainer:
    """A `Trainer` on every rank, each in a process of its own, as vLLM has a process group here."""

    def __init__(self, case: Case, checkpoint: Path, device: str) -> None:
        """Starts the processes, which have read the checkpoint when it ends."""
        context = processes.get_context("spawn")
        # not beside the checkpoint, which goes away: NCCL looks into it at its first collective
        meeting = tempfile.mkdtemp()
        self._pipes: list[Connection] = []
        for rank in range(case.ranks):
            mine, theirs = context.Pipe()
            arguments = rank, theirs, case, checkpoint, meeting, device
            context.Process(target=_serve, args=arguments, daemon=True).start()
            self._pipes.append(mine)
        for pipe in self._pipes:
            assert pipe.recv() == "ready"

    def _on_all(self, method: str, *arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((method, arguments))
        return [pipe.recv() for pipe in self._pipes]

    def needed(self) -> dict[str, str]:
        """See `Trainer`, as for the other methods."""
        contract: dict[str, str] = self._on_all("needed")[0]
        return contract

    def train(self) -> None:
        """Every rank has another batch."""
        self._on_all("train")

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Those of rank 0; all ranks go through the stream."""
        return iter(self._on_all("weights")[0])

    def compare(self, sampled: Rollouts) -> dict[str, Any]:
        """All ranks compute all tokens."""
        found = self._on_all("compare", sampled.to("cpu"))
        return {
            "tokens": sum(it["tokens"] for it in found),
            "unequal": sum(it["unequal"] for it in found),
            "largest_difference": max(it["largest_difference"] for it in found),
            "k3_kl": sum(it["k3_kl"] for it in found) / len(found),
        }


def _serve(
    rank: int, pipe: Connection, case: Case, checkpoint: Path, meeting: str, device: str
) -> None:
    end_with_parent()
    join_ranks(rank, case.ranks, meeting, device)
    trainer = Trainer(case, checkpoint, device)
    torch.manual_seed(rank)
    found: Any = "ready"
    while True:
        pipe.send(found)
        try:
            method, arguments = pipe.recv()
        except EOFError:  # the case is done
            return
        found = getattr(trainer, method)(*arguments)
        if isinstance(found, Iterator):
            # on a GPU the engine reads the tensors of this process, which holds them until asked
            # for something else
            found = list(found) if rank == 0 else [None for _ in found]
