"""All runs of a study in memory, and the arrays that statistics and figures take from them."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from experiments.runs.manifest import RunManifest
from experiments.study.schema import Study

Array = np.ndarray


def memory_source(study: Study) -> str:
    """Where a study's measured weight memory comes from."""
    # on a CPU verl's engine counts what it is given, see qat_core/verl/worker.py
    from_vllm = study.trainer == "verl" and study.device == "cuda"
    return "as vLLM reports" if from_vllm else "bytes streamed to the engine"


@dataclass(frozen=True)
class Results:
    """All runs of a study.

    Attributes:
        metrics: one row a run and step: run, model, arm, seed, step, then one column a metric.
        evals: one row a run and offline evaluation: run, model, arm, seed and `Evaluation`'s.
        manifests: by run id, in the order asked for.
    """

    metrics: pd.DataFrame
    evals: pd.DataFrame
    manifests: dict[str, RunManifest]

    def series(self, model: str, arm: str, key: str) -> Array:
        """One metric as float64 (seeds, steps); NaN where the trainer recorded it as undefined.

        Raises:
            ValueError: the metric is not recorded, or the seeds' steps differ.
        """
        if key not in self.metrics:
            raise ValueError(f"{model}, {arm}: metric {key} is not recorded; train the runs again")
        rows = self._rows(model, arm)
        steps = rows.groupby("seed")["step"].apply(tuple)
        if steps.nunique() > 1:
            counts = ", ".join(f"seed {seed}: {len(its)}" for seed, its in steps.items())
            raise ValueError(f"{model}, {arm}: steps differ between seeds ({counts}); finish them")
        return rows.pivot(index="seed", columns="step", values=key).to_numpy(float)

    def steps(self, model: str, arm: str) -> Array:
        """The steps of an arm's runs, ascending."""
        return np.unique(self._rows(model, arm)["step"])

    def series_beside(self, model: str, arm: str, control: str, key: str) -> tuple[Array, Array]:
        """`series` of two arms over the steps of both; they differ only where a run was stopped.

        Raises:
            ValueError: as `series`, or one arm has more steps than the other for no reason.
        """
        arm_ST, control_ST = self.series(model, arm, key), self.series(model, control, key)
        num_steps = min(arm_ST.shape[1], control_ST.shape[1])
        if arm_ST.shape != control_ST.shape and not self.was_stopped(model, arm, control):
            raise ValueError(
                f"{model}: {arm} has {arm_ST.shape[1]} steps, {control} {control_ST.shape[1]}; "
                "finish the runs"
            )
        return arm_ST[:, :num_steps], control_ST[:, :num_steps]

    def was_stopped(self, model: str, *arms: str) -> bool:
        """Whether any run of those arms was stopped before its last step."""
        manifests = self.manifests.values()
        return any(it.was_stopped for it in manifests if it.model == model and it.arm in arms)

    def last_evaluated(self, model: str, *arms: str) -> int:
        """The last trained step that was evaluated in all runs of those arms.

        Raises:
            ValueError: there is none.
        """
        runs = {run for run, it in self.manifests.items() if it.model == model and it.arm in arms}
        rows = self.evals[self.evals["run"].isin(runs) & (self.evals["step"] > 0)]
        num_runs = rows.groupby("step")["run"].nunique()
        steps = num_runs.index[num_runs == len(runs)]
        if steps.empty:
            raise ValueError(
                f"{model}, {', '.join(arms)}: no trained step is evaluated in all runs; "
                "evaluate again"
            )
        return int(steps.max())

    def success_rates(
        self, model: str, arm: str, step: int, precision: str, decoding: str
    ) -> Array:
        """Share of correct answers by prompt after a step, float64 (seeds, prompts).

        Step 0 is the base model, before any training.

        Raises:
            ValueError: a seed lacks that evaluation, or the prompt sets differ in size.
        """
        rows = self._of(self.evals, model, arm)
        rows = rows[(rows["precision"] == precision) & (rows["decoding"] == decoding)]
        rows = rows[rows["step"] == step].drop_duplicates("seed", keep="last")
        what = f"{model}, {arm}: {decoding} evaluation in {precision} at step {step}"
        num_seeds = self._of(self.metrics, model, arm)["seed"].nunique()
        if len(rows) != num_seeds:
            raise ValueError(f"{what}: {len(rows)} of {num_seeds} seeds; evaluate again")
        if rows["prompts"].nunique() > 1:
            raise ValueError(f"{what}: the seeds' prompt sets differ in size; evaluate again")
        rates = [
            np.divide(correct, samples)
            for correct, samples in zip(rows["correct"], rows["samples_per_prompt"], strict=True)
        ]
        return np.stack(rates)

    def _rows(self, model: str, arm: str) -> pd.DataFrame:
        """An arm's metrics; where seeds were stopped, of the steps that all of them did."""
        rows = self._of(self.metrics, model, arm)
        if not self.was_stopped(model, arm):
            return rows
        done_by_all: pd.DataFrame = rows[rows["step"] <= rows.groupby("seed")["step"].max().min()]
        return done_by_all

    def _of(self, frame: pd.DataFrame, model: str, arm: str) -> pd.DataFrame:
        return frame[(frame["model"] == model) & (frame["arm"] == arm)]
