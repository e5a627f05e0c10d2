"""A user's verl run over the recorded curves."""

import json
import re
from pathlib import Path

import pytest

from analysis.overlay import DEFAULT_RECORDS, draw, main, read_mlflow, read_recorded, read_verl
from qat_core.doctor.verl_run import K3

REWARD = "critic/score/mean"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    rows = [{"step": n, "data": {K3: 1e-5 * n, REWARD: 0.1 * n}} for n in range(1, 6)]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "mine.jsonl"


def test_the_run_lies_over_all_recorded_arms_and_the_band(own: Path) -> None:
    recorded = read_recorded(DEFAULT_RECORDS, "nano-dense-gpu")
    figure = draw(read_verl(own), "mine", recorded, (K3, REWARD), "dense")
    kl, reward = figure.axes
    labels = kl.get_legend_handles_labels()[1]
    assert labels[-1] == "mine" and len(labels) == len(recorded) + 1 == 5
    assert kl.get_yscale() == "log"
    assert kl.patches[0].get_extents().height > 0, "the band"
    assert reward.lines[-1].get_ydata().tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.parametrize(
    ("metric", "hint"),
    [
        ("rollout_corr/k3kl", f"did you mean {K3}\\?"),
        ("critic/score/man", f"did you mean {REWARD}\\?"),
        ("???", f"there are actor/.*{K3}"),
        ("step", "there are actor/"),
    ],
)
def test_a_metric_that_no_run_has_is_refused_with_the_nearest(
    own: Path, metric: str, hint: str
) -> None:
    recorded = read_recorded(DEFAULT_RECORDS, "nano-dense-gpu")
    with pytest.raises(ValueError, match=rf"--metrics: {re.escape(metric)}: in no run; {hint}"):
        draw(read_verl(own), "mine", recorded, (K3, metric), "dense")


def test_a_folder_is_no_place_for_the_figure(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "figures"
    folder.mkdir()
    monkeypatch.setattr("sys.argv", ["overlay", str(own), "--out", str(folder)])
    line = f"{folder}: a folder; name a file, such as {folder / 'figure.png'}"
    with pytest.raises(ValueError, match=re.escape(line)):
        main()
    assert not list(tmp_path.rglob("*.png"))


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no runs; name a folder of experiments/records"):
        read_recorded(tmp_path, "nano-dense-gpu")


def test_an_unknown_model_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="no runs of nano; --model is one of nano-dense-gpu, nano"):
        read_recorded(DEFAULT_RECORDS, "nano")


def test_a_run_of_mlflow_is_read_by_its_id(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    store = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(store)
    run_id = client.create_run(client.create_experiment("mine")).info.run_id
    for step in (2, 1):
        client.log_metric(run_id, K3, 1e-5 * step, step=step)
    frame = read_mlflow(store, run_id, (K3, REWARD))
    assert frame["step"].tolist() == [1, 2]
    assert frame[K3].tolist() == pytest.approx([1e-5, 2e-5])
    with pytest.raises(ValueError, match="nobody"):
        read_mlflow(store, "nobody", (K3,))
    with pytest.raises(ValueError, match="has none of critic/score/mean"):
        read_mlflow(store, run_id, (REWARD,))
