"""Offline evaluations of a run's checkpoints, as eval.json holds them."""

import math
from collections import Counter
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from experiments.rl.config import EvaluationConfig
from experiments.runs.manifest import Section
from experiments.runs.record import file_of, record_of
from experiments.support.json_files import check_model, read_model, write_json

EVALUATIONS = "eval.json"
Precision = Literal["bf16", "nvfp4"]
Decoding = Literal["greedy", "sampled"]


class Evaluation(Section):
    """One offline evaluation of one checkpoint."""

    step: NonNegativeInt = Field(description="0 is the base checkpoint")
    precision: Precision
    decoding: Decoding
    prompts: PositiveInt
    samples_per_prompt: PositiveInt
    accuracy: float = Field(ge=0, le=1, description="share of right answers")
    correct: list[NonNegativeInt] = Field(description="right answers per prompt")
    response_tokens_mean: NonNegativeFloat
    settings: EvaluationConfig | None = Field(
        None, description="the study's section `evaluation`; older files do not say"
    )
    device: Literal["cpu", "cuda"] | None = Field(
        None, description="where it was sampled; older files do not say: on the study's"
    )
    verifier: dict[str, str | None] | None = Field(
        None, description="rule and versions that judged mathematics; older files do not say"
    )

    @model_validator(mode="after")
    def _counts_agree(self) -> Self:
        if len(self.correct) != self.prompts:
            raise ValueError(f"correct: {len(self.correct)} of {self.prompts} prompts")
        if max(self.correct) > self.samples_per_prompt:
            raise ValueError(
                f"correct: {max(self.correct)} right answers of {self.samples_per_prompt} samples"
            )
        share = sum(self.correct) / (self.prompts * self.samples_per_prompt)
        # the same quotient of integers, so equal but for JSON's last digit
        if not math.isclose(self.accuracy, share, rel_tol=1e-12):
            raise ValueError(f"accuracy: {self.accuracy}, but correct makes {share}")
        return self


def read_evaluations(run_dir: Path, hint: str) -> list[Evaluation]:
    """The evaluations of a run, of results or of a record."""
    record, path = record_of(run_dir), file_of(run_dir, EVALUATIONS)
    if record is None:
        evaluations = read_model(run_dir / EVALUATIONS, list[Evaluation], hint)
    else:
        evaluations = check_model(record.evaluations(run_dir.name), path, list[Evaluation], hint)
    settings = Counter((it.step, it.precision, it.decoding) for it in evaluations)
    for (step, precision, decoding), count in settings.items():
        if count > 1:
            raise ValueError(
                f"{path}: step {step}, {precision}, {decoding}: evaluated twice; {hint}"
            )
    return evaluations


def write_evaluations(folder: Path, evaluations: list[Evaluation]) -> None:
    """Writes eval.json."""
    write_json(folder / EVALUATIONS, [evaluation.model_dump() for evaluation in evaluations])
