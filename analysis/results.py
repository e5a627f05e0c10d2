"""All runs of a study in memory, and the arrays that statistics and figures take from them."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from analysis.stats import Array
from experiments.rl.metric_names import RESPONSE_TOKENS
from experiments.runs.manifest import RunManifest, WeightMemory
from experiments.study.schema import Study
from qat_core.units import show_memory


def memory_source(study: Study, memories: Iterable[WeightMemory]) -> str:
    """Where a study's measured weight memory comes from."""
    if not study.measures_engine:
        return "bytes streamed to the engine"
    more = [it.reported_gib - it.measured_gib for it in memories if it.reported_gib is not None]
    if not more:  # of records that have this figure alone
        return "as vLLM reports, with its caches, workspaces and gaps"
    return f"parameters that vLLM holds; it reports up to {show_memory(max(more))} more"


@dataclass(frozen=True)
class Results:
    """All runs of a study."""

    # one row a run and step: run, model, arm, seed, step, then one column a metric
    metrics: pd.DataFrame
    # one row a run and offline evaluation: run, model, arm, seed and `Evaluation`'s
    evals: pd.DataFrame
    manifests: dict[str, RunManifest]  # by run id, in the order asked for
    # by run id, of the runs that watched it: rows as `experiments.runs.drift` reads them
    drift: dict[str, pd.DataFrame]

    def drift_of(self, model: str, arm: str) -> list[pd.DataFrame]:
        """The drift of an arm's weights, by seed."""
        runs = [run for run, it in self.manifests.items() if (it.model, it.arm) == (model, arm)]
        for run in runs:
            if run not in self.drift:
                raise ValueError(f"{run}: no drift is recorded; train it with rl.drift_every: 1")
        return [self.drift[run] for run in runs]

    def series(self, model: str, arm: str, key: str) -> Array:
        """One metric as float64 (seeds, steps); NaN where the trainer recorded it as undefined."""
        if key not in self.metrics:
            raise ValueError(f"{model}, {arm}: metric {key} is not recorded; train the runs again")
        rows = self._rows(model, arm)
        steps = rows.groupby("seed")["step"].apply(tuple)
        if steps.nunique() > 1:
            counts = ", ".join(f"seed {seed}: {len(its)}" for seed, its in steps.items())
            raise ValueError(f"{model}, {arm}: steps differ between seeds ({counts}); finish them")
        return rows.pivot(index="seed", columns="step", values=key).to_numpy(float)

    def weighted_beside(
        self, model: str, arm: str, control: str, key: str
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Of either arm a metric's values and its steps' tokens, as `series_beside`."""
        values = self.series_beside(model, arm, control, key)
        tokens = self.series_beside(model, arm, control, RESPONSE_TOKENS)
        return (values[0], tokens[0]), (values[1], tokens[1])

    def memory_of(self, model: str, arm: str) -> WeightMemory | None:
        """Weight memory of an arm's first run, None where the study has no such run."""
        runs = self.manifests.values()
        return next((run.memory for run in runs if (run.model, run.arm) == (model, arm)), None)

    def evaluated_steps(self, model: str, *arms: str) -> Array:
        """The steps after which all runs of arms were evaluated, ascending; 0 is the base."""
        runs = {run for run, it in self.manifests.items() if it.model == model and it.arm in arms}
        num_runs = self.evals[self.evals["run"].isin(runs)].groupby("step")["run"].nunique()
        return np.array(num_runs.index[num_runs == len(runs)])

    def steps(self, model: str, arm: str) -> Array:
        """The steps of an arm's runs, ascending."""
        return np.unique(self._rows(model, arm)["step"])

    def series_beside(self, model: str, arm: str, control: str, key: str) -> tuple[Array, Array]:
        """`series` of two arms over the steps of both; they differ only where a run was stopped."""
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
        """The last trained step that was evaluated in all runs of those arms."""
        steps = self.evaluated_steps(model, *arms)
        if not steps.any():
            raise ValueError(
                f"{model}, {', '.join(arms)}: no trained step is evaluated in all runs; "
                "evaluate again"
            )
        return int(steps.max())

    def samples_per_prompt(self, model: str) -> int:
        """The fewest sampled answers to a prompt of any evaluation."""
        rows = self.evals[(self.evals["model"] == model) & (self.evals["decoding"] == "sampled")]
        if rows.empty:
            raise ValueError(f"{model}: no sampled evaluation; evaluate again")
        return int(rows["samples_per_prompt"].min())

    def correct_answers(self, model: str, arm: str, step: int, precision: str) -> tuple[Array, int]:
        """Correct answers by prompt after a step (seeds, prompts), and samples of each prompt.

        Step 0 is the base model, before any training.
        """
        rows = self._evals_of(model, arm)
        rows = rows[(rows["precision"] == precision) & (rows["decoding"] == "sampled")]
        rows = rows[rows["step"] == step].drop_duplicates("seed", keep="last").sort_values("seed")
        what = f"{model}, {arm}: sampled evaluation in {precision} at step {step}"
        num_seeds = self._metrics_of(model, arm)["seed"].nunique()
        if len(rows) != num_seeds:
            raise ValueError(f"{what}: {len(rows)} of {num_seeds} seeds; evaluate again")
        if rows["prompts"].nunique() > 1 or rows["samples_per_prompt"].nunique() > 1:
            raise ValueError(f"{what}: the seeds' prompts or samples differ; evaluate again")
        return np.array(rows["correct"].tolist()), int(rows["samples_per_prompt"].iloc[0])

    def _rows(self, model: str, arm: str) -> pd.DataFrame:
        """An arm's metrics; where seeds were stopped, of the steps that all of them did."""
        rows = self._metrics_of(model, arm)
        if not self.was_stopped(model, arm):
            return rows
        done_by_all: pd.DataFrame = rows[rows["step"] <= rows.groupby("seed")["step"].max().min()]
        return done_by_all

    def _metrics_of(self, model: str, arm: str) -> pd.DataFrame:
        return self._metrics_by_arm.get((model, arm), self.metrics.iloc[:0])

    def _evals_of(self, model: str, arm: str) -> pd.DataFrame:
        return self._evals_by_arm.get((model, arm), self.evals.iloc[:0])

    # claims and figures ask for an arm hundreds of times
    @cached_property
    def _metrics_by_arm(self) -> dict[Hashable, pd.DataFrame]:
        return dict(iter(self.metrics.groupby(["model", "arm"])))

    @cached_property
    def _evals_by_arm(self) -> dict[Hashable, pd.DataFrame]:
        return dict(iter(self.evals.groupby(["model", "arm"])))
