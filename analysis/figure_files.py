"""The files that a study's figures are: the workflow reads it too, so nothing here draws."""

from collections.abc import Mapping
from typing import NamedTuple

from experiments.study.arms import ARMS
from experiments.study.schema import Study

FORMATS = ("png", "svg")  # records and pages have the first
DRIFT = "drift"
# of a record, for its page; a report draws all
RECORDED = ("kl", "accuracy", "curves", "reward", "survival", "answers")
MANY_SEEDS = 12  # more lines in one panel show nothing


class Kind(NamedTuple):
    """What the studies of one kind have."""

    protocol: str  # document with the rules, from the repository's root
    figures: Mapping[str, str]  # captions by name, without that of the drift


KINDS: Mapping[str, Kind] = {
    "parity": Kind(
        "docs/protocols/kl-claim.md",
        {
            "kl": "k3 KL of rollout and trainer by training step on a log axis, every arm and seed",
            "accuracy": (
                "Offline accuracy of every arm and seed in log-odds, evaluated in BF16 and in NVFP4"
            ),
            "learning": (
                "Offline accuracy of every evaluated checkpoint by training step, in "
                "BF16 and in NVFP4"
            ),
            "training": (
                "Online reward, response length, entropy and rollout_corr/kl by training "
                "step, all arms"
            ),
            "memory": (
                "Weights that the rollout engine holds or is sent, by arm, measured and predicted"
            ),
            "step_time": "Median time of a training step by part, all arms",
        },
    ),
    "collapse": Kind(
        "docs/protocols/collapse.md",
        {
            "curves": "Reward and k3 KL by training step, a column an arm",
            "reward": (
                "Mean reward of all steps, differences within a seed, and what the "
                "claims ask of them"
            ),
            "survival": (
                "Share of seeds without a collapse, by learning rate or, at one rate, by step"
            ),
            "corrections": (
                "Step at which each run collapsed, by arm and correction, at the highest rate"
            ),
            "answers": (
                "Offline accuracy of the last checkpoints, by arm and correction, in "
                "BF16 and in NVFP4"
            ),
            "behaviour": (
                "Response length, entropy and rollout_corr/kl by training step, a column an arm"
            ),
            "costs": (
                "Median time of a training step and weights of the rollout engine, a bar an arm"
            ),
            "causes": "Means of what was measured before the first collapse, by arm, a mark a seed",
        },
    ),
}
OF_BENCHMARKS = {
    "qwen3_memory": "Weights of Qwen3 in vLLM, and the tokens that its KV cache holds beside them",
    "qwen3_rollouts": "Seconds that the rollouts of a training step take in vLLM",
}
CAPTIONS = {
    **KINDS["parity"].figures,
    **KINDS["collapse"].figures,
    DRIFT: "When the NVFP4 codes of each layer and kind of weight have moved, by arm",
    **OF_BENCHMARKS,
}


def figure_names(study: Study) -> tuple[str, ...]:
    """The figures of a study: those of what it asks, compares and measures."""
    rates = {study.rl_of(cell).lr for cell in study.cells or [None]}
    drawn = {
        "reward": study.primary != "C1" and len(study.seeds) > 1 and "nvfp4-qat" in study.arms,
        "survival": len(rates) > 1 or len(study.seeds) > MANY_SEEDS,
        "causes": study.rl.measure_drift_term,
    }
    figures = tuple(it for it in KINDS[study.judged_by].figures if drawn.get(it, True))
    is_watched = study.rl.drift_every and any(ARMS[arm].rollout_recipe for arm in study.arms)
    return (*figures, DRIFT) if is_watched else figures


def recorded_names(study: Study) -> tuple[str, ...]:
    """Those of them that lie beside its record."""
    return tuple(it for it in figure_names(study) if it in RECORDED)
