"""Figures: they show what the claims say, repeat byte for byte, and take a user's verl run."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis.claims_table import show_ratio
from analysis.figure_files import FORMATS
from analysis.figures import BENCHMARK_FIGURES, FIGURES
from analysis.figures.front import BENCHMARKS, MACHINE
from analysis.overlay import DEFAULT_RECORDS, draw, main, read_mlflow, read_recorded, read_verl
from analysis.parity.judge import judge_study
from analysis.results import Results
from analysis.style import arm_style, save_figure
from analysis.tables.rows import read_servings
from experiments.study.schema import Study
from qat_core.doctor.verl_run import K3


def texts_of(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def bars_of(panel: Axes) -> list[Rectangle]:
    return [patch for patch in panel.patches if isinstance(patch, Rectangle)]


def test_kl_ratios_are_those_of_the_claims(study: Study, results: Results) -> None:
    shown = texts_of(FIGURES["kl"](study, results))
    claims = [it for it in judge_study(study, results).claims if it.name.endswith("kl_ratio")]
    assert len(claims) == 6
    for claim in claims:
        assert f": {show_ratio(claim.estimate)} BF16 ({claim.interval})" in shown


def estimates_of_first_model(study: Study, results: Results) -> dict[str, float | None]:
    """By claim's name."""
    claims = judge_study(study, results).claims
    return {it.name: it.estimate for it in claims if it.model == next(iter(study.models))}


def test_kl_lines_of_means_have_the_ratio_that_is_written(study: Study, results: Results) -> None:
    panel = FIGURES["kl"](study, results).axes[0]
    arm, bf16 = (line.get_ydata()[0] for line in panel.lines if line.get_linestyle() == "-.")
    claims = estimates_of_first_model(study, results)
    assert arm / bf16 == pytest.approx(claims["noqat_kl_ratio"], rel=1e-11)  # 12 digits


def test_kl_shows_no_ratio_to_a_floor_of_zero(study: Study, results: Results) -> None:
    results.metrics.loc[results.metrics["arm"] == "bf16", K3] = 0.0
    shown = texts_of(FIGURES["kl"](study, results))
    assert "no ratio" in shown and "infx" not in shown and "nanx" not in shown


def test_kl_shows_the_zero_of_an_exact_arm(study: Study, results: Results) -> None:
    assert FIGURES["kl"](study, results).axes[0].get_yscale() == "log"
    results.metrics.loc[results.metrics["arm"] == "nvfp4-qat", K3] = 0.0
    figure = FIGURES["kl"](study, replace(results))  # which keeps no arms
    low, _ = figure.axes[0].get_ylim()
    assert low < 0 < results.metrics[K3].max()
    assert texts_of(figure).count("exactly 0 at every step") == len(study.models)


def test_kl_marks_what_was_stopped_and_shows_overflow(study: Study, results: Results) -> None:
    assert "Star: ended by the KL gate" not in texts_of(FIGURES["kl"](study, results))
    run = "nano-moe_nvfp4-noqat_seed0"
    results.manifests[run] = results.manifests[run].model_copy(update={"reason": "stopped"})
    overflowed = (results.metrics["arm"] == "nvfp4-noqat") & (results.metrics["step"] > 15)
    results.metrics.loc[overflowed, K3] = None
    figure = FIGURES["kl"](study, replace(results))
    stars = [[line.get_marker() for line in axes.lines].count("*") for axes in figure.axes]
    assert [count > 0 for count in stars] == [False, True, False, False, False, False]
    assert "Star: ended by the KL gate" in texts_of(figure)
    assert "no QAT: overflow BF16" in texts_of(figure)


@pytest.mark.parametrize("name", FIGURES)
def test_a_study_without_bf16_draws(
    name: str, study: Study, results: Results, tmp_path: Path
) -> None:
    arms = ("nvfp4-qat",)
    alone = study.model_copy(update={"arms": arms})
    of_arm = replace(
        results,
        metrics=results.metrics[results.metrics["arm"].isin(arms)],
        evals=results.evals[results.evals["arm"].isin(arms)],
        manifests={run: it for run, it in results.manifests.items() if it.arm in arms},
    )
    save_figure(partial(FIGURES[name], alone, of_arm), tmp_path / f"{name}.png")


@pytest.mark.parametrize("name", FIGURES)
def test_one_model_and_fewer_arms_draw(name: str, study: Study, results: Results) -> None:
    models = {"nano-moe": study.models["nano-moe"]}
    smaller = study.model_copy(update={"models": models, "arms": ("bf16", "nvfp4-qat")})
    shown = texts_of(FIGURES[name](smaller, results))
    assert "nano-dense" not in shown
    assert "no QAT" not in shown


def test_accuracy_is_that_of_the_claims(study: Study, results: Results) -> None:
    figure = FIGURES["accuracy"](study, results)
    marks = [
        line.get_xdata()[0]
        for line in figure.axes[0].lines
        if line.get_marker() == arm_style("nvfp4-qat").marker
    ]
    claims = estimates_of_first_model(study, results)
    names = ["accuracy_log_odds", "served_log_odds", "served_gain", "served_beside_rounded"]
    wanted = [claims[name] for name in names]
    assert marks == pytest.approx(wanted, rel=1e-11)  # claims have 12 digits


def test_accuracy_shades_what_its_claims_require(study: Study, results: Results) -> None:
    panel = FIGURES["accuracy"](study, results).axes[0]
    shaded = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars_of(panel)]
    edge = panel.get_xlim()[1]
    margin = study.claims.accuracy_log_odds
    wanted = [(-margin, margin), (-study.claims.served_log_odds, edge), (0.0, edge)]
    # the width of a bar is a difference in FP64
    assert np.array(shaded) == pytest.approx(np.array(wanted), rel=1e-12)


def test_accuracy_without_bf16_is_the_arms_own(study: Study, results: Results) -> None:
    alone = study.model_copy(update={"arms": ("nvfp4-qat",)})
    figure = FIGURES["accuracy"](alone, results)
    shown = texts_of(figure)
    assert "accuracy (log-odds)" in shown
    assert "difference" not in shown and "margin" not in shown
    for axes, model in zip(figure.axes, study.models, strict=True):
        step = results.last_evaluated(model, "nvfp4-qat")
        correct_SP, samples = results.correct_answers(model, "nvfp4-qat", step, "bf16")
        right_S, wrong_S = correct_SP.sum(1), (samples - correct_SP).sum(1)
        expected = np.log((right_S + 0.5) / (wrong_S + 0.5))  # half an answer on either side
        assert axes.lines[0].get_xdata() == pytest.approx(expected, rel=1e-12)  # FP64 rounding


def test_training_leaves_out_what_was_not_recorded(study: Study, results: Results) -> None:
    del results.metrics["actor/entropy"]
    shown = texts_of(FIGURES["training"](study, results))
    assert "entropy" not in shown and "response length" in shown
    assert "compare arms by offline accuracy" in shown


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("memory", ("56.9 GiB", "16.9 GiB  -70.3%", "0.62 million", "1.05 million  +70.8%")),
        ("rollouts", ("256 prompts", "42.1 s", "43.0 s  +2.1%", "57.1 s", "44.5 s  -22.1%")),
    ],
)
def test_qwen3_is_drawn_as_recorded_and_repeats(
    tmp_path: Path, name: str, texts: tuple[str, ...]
) -> None:
    records = read_servings(BENCHMARKS, MACHINE)
    draw = BENCHMARK_FIGURES[f"qwen3_{name}"]
    shown = texts_of(draw(records))
    for text in texts:
        assert text in shown, text
    for file in ("a.png", "b.png", "a.svg", "b.svg"):
        save_figure(partial(draw, records), tmp_path / file)
    for kind in FORMATS:
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


def test_unknown_arm_is_refused() -> None:
    with pytest.raises(ValueError, match="arm int4: unknown; add it"):
        arm_style("int4")


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


def test_a_model_without_records_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no runs; name a folder of experiments/records"):
        read_recorded(tmp_path, "nano-dense-gpu")
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
