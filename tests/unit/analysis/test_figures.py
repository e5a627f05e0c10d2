from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from analysis.claims_table import show_ratio
from analysis.figure_files import FORMATS
from analysis.figures import BENCHMARK_FIGURES, FIGURES
from analysis.figures.front import BENCHMARKS, MACHINE
from analysis.parity.judge import judge_study
from analysis.results import Results
from analysis.style import arm_style, save_figure
from analysis.tables.engines import read_servings
from experiments.study.schema import Study

K3 = "rollout_corr/k3_kl"


def texts_of(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def bars_of(panel: Axes) -> list[Rectangle]:
    return [patch for patch in panel.patches if isinstance(patch, Rectangle)]


@pytest.mark.long
@pytest.mark.parametrize("name", FIGURES)
def test_files_repeat_byte_for_byte(
    name: str, study: Study, results: Results, tmp_path: Path
) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        for kind in FORMATS:
            save_figure(partial(FIGURES[name].draw, study, results), folder / f"{name}.{kind}")
    for kind in FORMATS:
        first, second = ((folder / f"{name}.{kind}").read_bytes() for folder in folders)
        assert first == second
    with Image.open(folders[0] / f"{name}.png") as image:
        assert image.width == 1170
        # no text chunk: neither matplotlib's version nor a date
        assert set(image.info) <= {"dpi"}
    assert "dc:date" not in (folders[0] / f"{name}.svg").read_text()


def test_kl_ratios_are_those_of_the_claims(study: Study, results: Results) -> None:
    shown = texts_of(FIGURES["kl"].draw(study, results))
    claims = [it for it in judge_study(study, results).claims if it.name.endswith("kl_ratio")]
    assert len(claims) == 6
    for claim in claims:
        assert claim.estimate is not None
        assert f": {show_ratio(claim.estimate)} BF16 ({claim.interval})" in shown


def estimates_of_first_model(study: Study, results: Results) -> dict[str, float | None]:
    """By claim's name."""
    claims = judge_study(study, results).claims
    return {it.name: it.estimate for it in claims if it.model == next(iter(study.models))}


def test_kl_lines_of_means_have_the_ratio_that_is_written(study: Study, results: Results) -> None:
    panel = FIGURES["kl"].draw(study, results).axes[0]
    arm, bf16 = (line.get_ydata()[0] for line in panel.lines if line.get_linestyle() == "-.")
    claims = estimates_of_first_model(study, results)
    assert arm / bf16 == pytest.approx(claims["noqat_kl_ratio"], rel=1e-11)  # 12 digits


def test_kl_shows_no_ratio_to_a_floor_of_zero(study: Study, results: Results) -> None:
    results.metrics.loc[results.metrics["arm"] == "bf16", K3] = 0.0
    shown = texts_of(FIGURES["kl"].draw(study, results))
    assert "no ratio" in shown and "infx" not in shown and "nanx" not in shown


def test_kl_shows_the_zero_of_an_exact_arm(study: Study, results: Results) -> None:
    assert FIGURES["kl"].draw(study, results).axes[0].get_yscale() == "log"
    results.metrics.loc[results.metrics["arm"] == "nvfp4-qat", K3] = 0.0
    figure = FIGURES["kl"].draw(study, results)
    low, _ = figure.axes[0].get_ylim()
    assert low < 0 < results.metrics[K3].max()
    assert texts_of(figure).count("exactly 0 at every step") == len(study.models)


def test_kl_marks_what_was_stopped_and_shows_overflow(study: Study, results: Results) -> None:
    assert "Star: ended by the KL gate" not in texts_of(FIGURES["kl"].draw(study, results))
    run = "nano-moe_nvfp4-noqat_seed0"
    results.manifests[run] = results.manifests[run].model_copy(update={"reason": "stopped"})
    overflowed = (results.metrics["arm"] == "nvfp4-noqat") & (results.metrics["step"] > 15)
    results.metrics.loc[overflowed, K3] = None
    figure = FIGURES["kl"].draw(study, results)
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
    save_figure(partial(FIGURES[name].draw, alone, of_arm), tmp_path / f"{name}.png")


@pytest.mark.parametrize("name", FIGURES)
def test_one_model_and_fewer_arms_draw(name: str, study: Study, results: Results) -> None:
    models = {"nano-moe": study.models["nano-moe"]}
    smaller = study.model_copy(update={"models": models, "arms": ("bf16", "nvfp4-qat")})
    shown = texts_of(FIGURES[name].draw(smaller, results))
    assert "nano-dense" not in shown
    assert "no QAT" not in shown


def test_accuracy_is_that_of_the_claims(study: Study, results: Results) -> None:
    figure = FIGURES["accuracy"].draw(study, results)
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
    panel = FIGURES["accuracy"].draw(study, results).axes[0]
    shaded = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars_of(panel)]
    edge = panel.get_xlim()[1]
    margin = study.claims.accuracy_log_odds
    wanted = [(-margin, margin), (-study.claims.served_log_odds, edge), (0.0, edge)]
    # the width of a bar is a difference in FP64
    assert np.array(shaded) == pytest.approx(np.array(wanted), rel=1e-12)


def test_accuracy_without_bf16_is_the_arms_own(study: Study, results: Results) -> None:
    alone = study.model_copy(update={"arms": ("nvfp4-qat",)})
    figure = FIGURES["accuracy"].draw(alone, results)
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
    shown = texts_of(FIGURES["training"].draw(study, results))
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
    draw = BENCHMARK_FIGURES[f"qwen3_{name}"].draw
    shown = texts_of(draw(records))
    for text in texts:
        assert text in shown, text
    for file in ("a.png", "b.png", "a.svg", "b.svg"):
        save_figure(partial(draw, records), tmp_path / file)
    for kind in FORMATS:
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_reads_no_more_than_it_says(name: str, study: Study, results: Results) -> None:
    """The report names these files as the figure's source."""
    shown = texts_of(FIGURES[name].draw(study, results))
    unread = {"metrics", "evals", "drift"} - set(FIGURES[name].reads)
    less = {it: {} if it == "drift" else getattr(results, it).iloc[:0] for it in unread}
    assert texts_of(FIGURES[name].draw(study, replace(results, **less))) == shown


def test_unknown_arm_is_refused() -> None:
    with pytest.raises(ValueError, match="arm int4: unknown; add it"):
        arm_style("int4")
