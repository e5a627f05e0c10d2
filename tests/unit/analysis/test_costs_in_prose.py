"""Costs of training that pages state in sentences are of the records."""

from typing import Any

from tests.unit.analysis.readme import benchmark, one_line

PAGE = one_line("docs/performance.md")


def arms(shape: str, checkpointing: bool) -> Any:
    stacks = benchmark("parameter_h200")["stacks"]
    (found,) = (it for it in stacks if (it["shape"], it["checkpointing"]) == (shape, checkpointing))
    return found["arms"]


def ratios(shape: str, checkpointing: bool, suffix: str = "") -> list[str]:
    """Over BF16's step: by default, kept packed, kept rounded."""
    measured = arms(shape, checkpointing)
    return [f"{measured[it + suffix]['ratio']:.3f}" for it in ("qat", "qat packed", "qat rounded")]


def quartiles(shape: str, checkpointing: bool, arm: str) -> str:
    low, _, high = arms(shape, checkpointing)[arm]["ratio_by_round"]
    return f"{low:.3f} and {high:.3f}"


def test_a_dense_models_layers_miss_their_goal() -> None:
    missed = [
        f"{float(edge(ratios('qwen3-8b', checkpointing))) - 1.01:.3f}"
        for checkpointing in (False, True)
        for edge in (min, max)
    ]
    assert (
        "without gradient checkpointing by {} to {} of BF16's time, with it by {} to {}."
    ).format(*missed) in PAGE


def test_an_moes_layers_meet_their_goal_if_kept_rounded() -> None:
    moe = "qwen3-30b-a3b"
    alone, checkpointed = ratios(moe, False), ratios(moe, True)
    further = ratios(moe, False, ", scales known")
    assert (
        f"{alone[2]} times BF16's time (quartiles {quartiles(moe, False, 'qat rounded')}), with "
        f"checkpointing {checkpointed[2]}. The default misses it: {alone[0]} and {checkpointed[0]}."
    ) in PAGE
    assert f"A further micro-batch costs nothing: {further[2]}." in PAGE
    assert f"takes {further[1]} times BF16's time instead of {further[0]}, for 0.56 bytes" in PAGE
    measured = arms(moe, False)
    first_ms, further_ms = (
        measured[arm]["step_ms"][1] for arm in ("qat rounded", "qat rounded, scales known")
    )
    assert f"takes {first_ms - further_ms:.1f} ms more than a further one" in PAGE
    assert f"the peak of memory is {measured['qat rounded']['peak_ratio']:.2f} times BF16" in PAGE


def test_noise_of_an_moes_layers_with_checkpointing() -> None:
    moe = "qwen3-30b-a3b"
    assert (
        f"quartiles of QAT kept rounded are {quartiles(moe, True, 'qat rounded')}, of the default "
        f"{quartiles(moe, True, 'qat')}"
    ) in PAGE


def test_half_an_moes_layers_through_verl() -> None:
    runs = benchmark("verl_h200_30b_half")["runs"]
    assert [run["arm"] for run in runs] == ["bf16", "nvfp4-qat", "nvfp4-qat"]
    floor, humming, marlin = runs
    assert humming["environment"]["QAT_CORE_EXPERTS_KERNEL"] == "humming"
    assert "QAT_CORE_EXPERTS_KERNEL" not in marlin["environment"]

    def seconds(run: Any, part: str) -> str:
        """Median, in brackets from least to most where steps are several."""
        low, middle, high = (run[f"{part}_s"][key] for key in ("low", "median", "high"))
        return f"{middle:.1f} s" + (f" ({low:.1f} to {high:.1f})" if low < high else "")

    step_s = [f"{run['step_s']['median']:.1f} s" for run in (humming, marlin, floor)]
    assert (
        "a step takes {} with QAT and experts by Humming, {} with QAT and Marlin, and {} in BF16"
    ).format(*step_s) in PAGE
    for part, name in (("rollout", "Rollouts take"), ("training", "training")):
        times = [seconds(run, part) for run in (humming, marlin, floor)]
        assert "{} {}, {} and {};".format(name, *times) in PAGE
    kl = [run["mean_k3_kl"] / floor["mean_k3_kl"] for run in (humming, marlin)]
    assert "Mean k3 KL is {:.2f} and {:.2f} times BF16's".format(*kl) in PAGE
