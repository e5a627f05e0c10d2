from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure
from PIL import Image

from analysis.claims_table import show_ratio
from analysis.figures import FIGURES
from analysis.results import Results
from analysis.stats import interquartile_mean
from analysis.style import arm_style, new_figure, save_figure, spread_labels
from experiments.study.arms import ARMS
from experiments.study.schema import Study


def texts_of(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


@pytest.mark.parametrize("name", FIGURES)
def test_png_repeats_byte_for_byte(
    name: str, study: Study, results: Results, tmp_path: Path
) -> None:
    paths = [tmp_path / "first.png", tmp_path / "second.png"]
    for path in paths:
        save_figure(partial(FIGURES[name].draw, study, results), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    with Image.open(paths[0]) as image:
        assert image.width == 1440
        # no text chunk: neither matplotlib's version nor a date
        assert set(image.info) <= {"dpi"}


def test_kl_panels_are_logarithmic_and_labelled(study: Study, results: Results) -> None:
    figure = FIGURES["kl"].draw(study, results)
    for panel, model in zip(figure.axes, study.models, strict=True):
        assert panel.get_yscale() == "log"
        assert panel.get_title(loc=matplotlib.rcParams["axes.titlelocation"]) == model
        labels = [text.get_text() for text in panel.texts]
        assert labels.count("noise floor") == 1
        assert sum(label.endswith("x") for label in labels) == len(study.arms) - 1
    assert "KL(rollout || train)" in figure.axes[0].get_ylabel()


def test_kl_ratio_labels_state_the_data(study: Study, results: Results) -> None:
    figure = FIGURES["kl"].draw(study, results)
    kl = [results.series("nano-moe", arm, "rollout_corr/k3_kl") for arm in ("nvfp4-noqat", "bf16")]
    ratio = interquartile_mean(kl[0]) / interquartile_mean(kl[1])
    assert show_ratio(ratio) in {text.get_text() for text in figure.axes[1].texts}


def test_kl_shows_no_ratio_to_a_floor_of_zero(study: Study, results: Results) -> None:
    results.metrics.loc[results.metrics["arm"] == "bf16", "rollout_corr/k3_kl"] = 0.0
    shown = texts_of(FIGURES["kl"].draw(study, results))
    assert "noise floor" in shown and "infx" not in shown and "nanx" not in shown


def test_kl_marks_what_was_stopped_and_labels_overflow(study: Study, results: Results) -> None:
    unmarked = texts_of(FIGURES["kl"].draw(study, results))
    assert "x: ended by the KL gate" not in unmarked and "Gap: overflow" not in unmarked
    run = "nano-moe_nvfp4-noqat_seed0"
    results.manifests[run] = results.manifests[run].model_copy(update={"reason": "stopped"})
    overflowed = (results.metrics["arm"] == "nvfp4-noqat") & (results.metrics["step"] > 15)
    results.metrics.loc[overflowed, "rollout_corr/k3_kl"] = None
    figure = FIGURES["kl"].draw(study, results)
    marks = [[line.get_marker() for line in panel.lines].count("x") for panel in figure.axes]
    assert marks == [0, 1]
    for text in ("x: ended by the KL gate", "Gap: overflow", "\noverflow\n"):
        assert text in texts_of(figure)


@pytest.mark.parametrize("name", ["kl", "reward", "accuracy"])
def test_one_model_and_fewer_arms_draw(name: str, study: Study, results: Results) -> None:
    models = {"nano-moe": study.models["nano-moe"]}
    smaller = study.model_copy(update={"models": models, "arms": ("bf16", "nvfp4-qat")})
    shown = texts_of(FIGURES[name].draw(smaller, results))
    assert "nano-dense" not in shown
    assert "no QAT" not in shown


def test_memory_shows_sizes_and_qwen3_predictions(study: Study, results: Results) -> None:
    shown = texts_of(FIGURES["memory"].draw(study, results))
    # the sizes that the project promises from shapes alone
    for size in ("56.87 GiB", "16.85 GiB", "18.06 GiB", "15.26 GiB", "5.96 GiB", "7.98 GiB"):
        assert size in shown
    assert "-60.0%" in shown


def test_accuracy_names_an_earlier_step(study: Study, results: Results) -> None:
    planned = study.model_copy(update={"rl": study.rl.model_copy(update={"steps": 40})})
    assert "(step 30 of 40)" in texts_of(FIGURES["accuracy"].draw(planned, results))
    assert "(step" not in texts_of(FIGURES["accuracy"].draw(study, results))


def test_memory_shares_are_of_bf16_also_without_that_arm(study: Study, results: Results) -> None:
    smaller = study.model_copy(update={"arms": ("nvfp4-qat", "nvfp4-qat-ffn")})
    packed = {run: it for run, it in results.manifests.items() if it.arm in smaller.arms}
    shown = texts_of(FIGURES["memory"].draw(smaller, replace(results, manifests=packed)))
    assert "bytes streamed to the engine" in shown
    assert "-60.0%" in shown and "-44.9%" in shown


def test_every_arm_has_a_distinct_style() -> None:
    styles = [arm_style(arm) for arm in ARMS]
    assert len({style.color for style in styles}) == len(styles)
    assert len({style.label for style in styles}) == len(styles)


def test_unknown_arm_is_refused() -> None:
    with pytest.raises(ValueError, match="arm int4: unknown; add it"):
        arm_style("int4")


def test_labels_never_overlap() -> None:
    _, axes = new_figure("title", "note", height_inches=3)
    axes[0][0].set(yscale="log", ylim=(1e-4, 1.0))
    heights = spread_labels(axes[0][0], {"a": 1e-3, "b": 1.01e-3, "c": 1.02e-3, "d": 0.5})
    ordered = sorted(heights.values())
    # a float's rounding of the gap
    assert all(b - a >= 0.06 - 1e-9 for a, b in pairwise(ordered))
    assert heights["a"] == pytest.approx(0.25)
