"""GRPO in one process: sync weights, sample, compare log-probs, update; resumable at any time."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from experiments.rl import resume
from experiments.rl.config import GrpoConfig, TaskConfig
from experiments.rl.loss import advantages, drift_term_metrics
from experiments.rl.metric_names import DRIFT_FILE
from experiments.rl.optimizer import MasterAdamW
from experiments.rl.policy import Policy, Scores
from experiments.rl.prompts import decode_responses, encode_prompt
from experiments.rl.step_metrics import length_metrics, performance_metrics, score_metrics
from experiments.rl.tasks import Problem, make_problems, score
from experiments.rl.update import needs_old_scores, old_scores, update_policy
from experiments.rl.weight_distance import WeightDistance
from qat_core.mismatch import as_floats, masked_mean, mismatch_metrics
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.engine import Rollouts
from qat_core.rollout.start import EngineKind, start_engine
from qat_core.weights.coverage import Row, coverage
from qat_core.weights.stream import weight_stream

if TYPE_CHECKING:
    from experiments.rl.drift_log import DriftLog

OnStep = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """All that decides one run of one arm."""

    base_dir: Path  # checkpoint in Hugging Face form that training starts from
    checkpoint_dir: Path  # folder of the run's own checkpoints
    train_recipe: Recipe | None  # fake quantization of the trainer's forward pass; None: BF16
    rollout_recipe: Recipe | None  # what the rollout engine gets packed; None: BF16
    task: TaskConfig  # problems and their verifier
    grpo: GrpoConfig  # settings of the algorithm
    seed: int = 0  # of the problems drawn and the responses sampled
    device: str = "cpu"  # "cpu" or "cuda"
    engine: EngineKind = "eager"  # which rollout engine
    exact: bool = False  # training computes the bits of vLLM's rollouts, checked at every step
    # what the run may take of a GPU that others use too; None: the whole GPU
    gpu_memory_gib: float | None = None


class GrpoTrainer:
    """One run of one arm: a policy, its optimizer and a rollout engine with weights of its own."""

    def __init__(self, run: TrainerConfig) -> None:
        self.run, self.config = run, run.grpo
        self.tokenizer = AutoTokenizer.from_pretrained(run.base_dir)
        self.policy = Policy(
            run.base_dir,
            run.train_recipe,
            run.device,
            exact=run.exact,
            replays_routes=run.grpo.routing_replay,
        )
        packed = run.rollout_recipe
        self.plan = plan(self.policy.model, packed) if packed else None
        config, sampling = run.grpo, run.grpo.rollout
        self.optimizer = MasterAdamW(self.policy.model.parameters(), config.lr, config.weight_decay)
        max_tokens = sampling.max_prompt_tokens + sampling.max_response_tokens
        self.engine = start_engine(
            run.engine,
            run.base_dir,
            run.device,
            self.plan,
            max_tokens,
            keeps_distributions=config.keeps_distributions,
            returns_routes=config.routing_replay,
            gpu_memory_gib=run.gpu_memory_gib,
            exact=run.exact,
        )
        self.weight_distance = None
        if config.measure_drift_term:  # of all that NVFP4 could take, in every arm alike
            everything = plan(self.policy.model, Recipe())
            self.weight_distance = WeightDistance(self.policy.model, everything, Recipe())
        self.problems = make_problems(run.task, "train")
        self.timings_s: dict[str, float] = {}
        self.drift = self._drift_log()

    def train(self, on_step: OnStep) -> None:
        """Runs the remaining steps; `on_step(step, metrics)` is called after each of them."""
        self.coverage()
        first = resume.load(self.run.checkpoint_dir, self.optimizer) + 1
        if self.drift is not None:
            self.drift.start(first - 1)
        for step in range(first, self.config.steps + 1):
            on_step(step, self.step(step))
            if step % self.config.save_every == 0 or step == self.config.steps:
                self._save(step)

    def coverage(self) -> list[Row]:
        """How every weight is trained, sent and, after a sync of all, served."""
        self._sync()
        is_qat = self.policy.plan is not None
        return coverage(self.policy.model, self.plan, self.engine.served, qat=is_qat)

    def step(self, step: int) -> dict[str, float]:
        """One round of sync, rollout and update; all randomness derives from seed and step."""
        config = self.config
        with self._timed("step"):
            problems, rollouts = self.sample(step)
            scores_B = self._score(problems, rollouts)
            with self._timed("old_log_prob"):
                old = None
                if needs_old_scores(config):
                    old = old_scores(self.policy, rollouts, config)
            with self._timed("update_actor"):
                advantages_B1 = advantages(scores_B, config)[:, None]
                actor, old = update_policy(
                    self.policy, self.optimizer, rollouts, old, advantages_B1, config
                )
        mask_BT, batch = rollouts.response_mask, (rollouts.input_ids, rollouts.attention_mask)
        return {
            **(self._require_exact(old, rollouts) if self.run.exact else {}),
            **mismatch_metrics(
                old.log_probs_BT, rollouts.log_probs, mask_BT, config.rollout_is_threshold
            ),
            "actor/entropy": masked_mean(old.entropy_BT, mask_BT).item(),
            **actor,
            **self._drift_term(old, advantages_B1, rollouts),
            **score_metrics(scores_B),
            **length_metrics(rollouts),
            **performance_metrics(rollouts, self.timings_s),
            **(self.drift.record(step, *batch) if self.drift else {}),
        }

    def _require_exact(self, old: Scores, rollouts: Rollouts) -> dict[str, float]:
        """The count of log-probs that differ; ValueError with the first layer above zero."""
        from qat_core.exact.count import NotExact, require_equal

        try:
            return require_equal(old.log_probs_BT, rollouts.log_probs, rollouts.response_mask)
        except NotExact as error:
            from qat_core.rollout.vllm.first_difference import first_difference

            self._sync()  # the update may have changed the policy
            engine: Any = self.engine
            tokens = rollouts.input_ids[error.row][rollouts.attention_mask[error.row] > 0]
            place = first_difference(engine, self.policy.model, tokens.tolist())
            where = place or "no layer of a prefill: decoding or log-probs alone"
            raise ValueError(f"{error}; with the newest weights first in {where}") from None

    def sample(self, step: int) -> tuple[list[Problem], Rollouts]:
        """Syncs the weights and draws the step's rollouts; changes nothing of what is trained."""
        problems = self._draw_problems(step)
        with self._timed("update_weights"):
            self._sync()
        with self._timed("gen"):
            rollouts = self._generate(problems, step)
        return problems, rollouts

    def _drift_term(
        self, old: Scores, advantages_B1: Tensor, rollouts: Rollouts
    ) -> dict[str, float]:
        if self.weight_distance is None:
            return {}
        assert old.score_means_BT is not None
        metrics = drift_term_metrics(advantages_B1, old.score_means_BT, rollouts.response_mask)
        return as_floats(
            metrics | {"drift_term/weight_steps": self.weight_distance.rms(self.policy.model)}
        )

    def _drift_log(self) -> "DriftLog | None":
        """Of weights that are sent in NVFP4, where the run asks for it."""
        recipe, every = self.run.rollout_recipe, self.config.drift_every
        if recipe is None or every == 0:
            return None
        from experiments.rl.drift_log import DriftLog

        path = self.run.checkpoint_dir.parent / DRIFT_FILE
        return DriftLog(self.policy.model, recipe, path, every)

    def _sync(self) -> None:
        if self.run.exact:
            from qat_core.exact.contract import needed

            engine: Any = self.engine  # vLLM's: `start_engine` knows no other exact one
            engine.require_contract(needed(self.policy.model))
        stream = weight_stream(self.policy.model, self.plan, self.run.rollout_recipe)
        self.engine.sync(stream, self.plan)

    def _draw_problems(self, step: int) -> list[Problem]:
        rng = random.Random(f"{self.run.seed} {step}")
        drawn = rng.sample(self.problems, self.config.prompts_per_step)
        return [problem for problem in drawn for _ in range(self.config.responses_per_prompt)]

    def _generate(self, problems: list[Problem], step: int) -> Rollouts:
        sampling = self.config.rollout
        encoded = {p: encode_prompt(self.tokenizer, p) for p in dict.fromkeys(problems)}
        prompts = [encoded[problem] for problem in problems]
        longest = max(map(len, prompts))
        if longest > sampling.max_prompt_tokens:
            raise ValueError(
                f"rl.rollout.max_prompt_tokens: {sampling.max_prompt_tokens} is less than the "
                f"{longest} tokens of a prompt; raise it"
            )
        rollouts = self.engine.generate(
            prompts,
            sampling.max_response_tokens,
            sampling.temperature,
            self.run.seed * 100_003 + step,
        )
        return rollouts.to(self.run.device)

    def _score(self, problems: list[Problem], rollouts: Rollouts) -> Tensor:
        texts = decode_responses(self.tokenizer, rollouts)
        scores = [score(self.run.task, t, p.answer) for t, p in zip(texts, problems, strict=True)]
        return torch.tensor(scores, device=rollouts.log_probs.device)

    def _save(self, step: int) -> None:
        resume.save(
            self.run.checkpoint_dir, step, self.policy.model, self.tokenizer, self.optimizer
        )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.run.device == "cuda":
            torch.cuda.synchronize()
        self.timings_s[name] = time.perf_counter() - start
