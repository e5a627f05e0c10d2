import pyarrow.parquet as pq
import torch

from analysis.metrics import CATALOGUE
from experiments.rl.metric_names import K3_KL
from experiments.study.schema import ROOT
from qat_core.mismatch import mismatch_metrics


def test_catalogue_has_every_mismatch_metric_and_no_other() -> None:
    log_probs = torch.log(torch.tensor([[0.5, 0.25], [0.5, 0.125]]))
    computed = mismatch_metrics(log_probs, log_probs, torch.ones(2, 2), threshold=2.0)
    assert set(computed) == {key for key in CATALOGUE if key.startswith("rollout_corr/")}


def recorded_columns() -> set[str]:
    files = (ROOT / "experiments" / "records").glob("*/metrics.parquet")
    return {name for file in files for name in pq.read_schema(file).names}


def test_catalogue_has_every_metric_of_the_records() -> None:
    columns = recorded_columns()
    assert K3_KL in columns and "perf/mfu/actor" in columns, "of both trainers"
    assert columns - set(CATALOGUE) == {"run", "step"}


def test_catalogue_has_what_mlflow_gets_at_the_end_of_a_run() -> None:
    accuracies = {f"eval/{p}/{d}" for p in ("bf16", "nvfp4") for d in ("greedy", "sampled")}
    assert {key for key in CATALOGUE if key.startswith("eval/")} == accuracies
