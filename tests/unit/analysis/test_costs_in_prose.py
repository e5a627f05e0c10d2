"""Costs of training that pages state in sentences are of the records."""

from typing import Any

from tests.unit.analysis.readme import benchmark, one_line

PAGE = one_line("docs/performance.md")


def arms(shape: str, checkpointing: bool) -> Any:
    setting = "gradient checkpointing" if checkpointing else ""
    rows = benchmark("parameter_h200")["rows"]
    return {it["arm"]: it for it in rows if (it["shape"], it["setting"]) == (shape, setting)}


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


def test_peaks_of_memory_with_checkpointing() -> None:
    more_gib = []
    for shape in ("qwen3-8b", "qwen3-30b-a3b"):
        peak_gib = {arm: it["peak_gib"] for arm, it in arms(shape, True).items()}
        more_gib.append(f"{peak_gib['qat'] - peak_gib['bf16']:.2f}")
    dense, moe = more_gib
    assert (
        f"The peak of memory is {dense} GiB above BF16's for Qwen3-8B and {moe} for the MoE."
    ) in PAGE


def test_an_moes_layers_meet_their_goal_if_kept_rounded() -> None:
    moe = "qwen3-30b-a3b"
    alone, checkpointed = ratios(moe, False), ratios(moe, True)
    further = ratios(moe, False, ", scales known")
    by_round = quartiles(moe, False, "qat rounded")
    assert (
        f"{alone[2]} times BF16's time (quartiles by round {by_round}), with "
        f"checkpointing {checkpointed[2]}, which is too noisy to judge. The default misses it: "
        f"{alone[0]} and {checkpointed[0]}."
    ) in PAGE
    assert f"further micro-batch costs nothing without checkpointing: {further[2]}." in PAGE
    assert f"takes {further[1]} times BF16's time instead of {further[0]}, for 0.56 bytes" in PAGE
    measured = arms(moe, False)
    first_ms, further_ms = (
        measured[arm]["step_ms"][1] for arm in ("qat rounded", "qat rounded, scales known")
    )
    assert f"takes {first_ms - further_ms:.1f} ms more than a further one" in PAGE
    assert f"the peak of memory is {measured['qat rounded']['peak_ratio']:.2f} times BF16" in PAGE


def test_noise_of_an_moes_layers_with_checkpointing() -> None:
    moe = "qwen3-30b-a3b"
    middle = arms(moe, True)["qat rounded"]["ratio_by_round"][1]
    assert (
        f"QAT kept rounded has a median of {middle:.3f} and quartiles of "
        f"{quartiles(moe, True, 'qat rounded')}, the default quartiles of "
        f"{quartiles(moe, True, 'qat')}"
    ) in PAGE


def test_half_an_moes_layers_through_verl() -> None:
    runs = benchmark("verl_h200_30b_half")["rows"]
    assert [run["arm"] for run in runs] == ["bf16", "nvfp4-qat", "nvfp4-qat"]
    floor, humming, marlin = runs
    assert humming["environment.QAT_CORE_EXPERTS_KERNEL"] == "humming"
    assert "environment.QAT_CORE_EXPERTS_KERNEL" not in marlin

    def seconds(run: Any, part: str) -> str:
        """Median, in brackets from least to most where steps are several."""
        low, middle, high = run[f"{part}_s"]
        return f"{middle:.1f} s" + (f" ({low:.1f} to {high:.1f})" if low < high else "")

    step_s = [f"{run['step_s'][1]:.1f} s" for run in (humming, marlin, floor)]
    assert (
        "a step takes {} with QAT and experts by Humming, {} with QAT and Marlin, and {} in BF16"
    ).format(*step_s) in PAGE
    for part, name in (("rollout", "Rollouts take"), ("training", "training")):
        times = [seconds(run, part) for run in (humming, marlin, floor)]
        assert "{} {}, {} and {};".format(name, *times) in PAGE
    kl = [run["mean_k3_kl"] / floor["mean_k3_kl"] for run in (humming, marlin)]
    assert "Mean k3 KL is {:.2f} and {:.2f} times BF16's".format(*kl) in PAGE
    assert f"{kl[0]:.2f} times through verl with half of Qwen3-30B-A3B's layers" in one_line(
        "docs/verl.md"
    )
    training_s = [run["training_s"][1] for run in (humming, marlin, floor)]
    assert (
        "it took {:.1f} and {:.1f} s in two runs with QAT and {:.1f} s in BF16, whose steps took "
        "up to {:.1f}."
    ).format(*training_s, floor["training_s"][2]) in PAGE


def test_waits_for_weights_that_are_offloaded_in_between() -> None:
    now, before = (
        benchmark(f"offloaded_steps_h200x2{suffix}")["rows"] for suffix in ("", "_before")
    )

    def of_bf16(rows: Any, shape: str) -> dict[str, str]:
        """QAT's median over BF16's, by part."""
        return {row["part"]: f"{row['of_bf16']:.2f}" for row in rows if row["shape"] == shape}

    def fetch_ms(rows: Any, arm: str) -> list[str]:
        """When the CPU had queued it, and how long it took."""
        wanted = ("qwen3-30b-a3b", "fetch")
        (row,) = (row for row in rows if (row["shape"], row["part"]) == wanted)
        return [f"{row[f'{arm}{key}'][1]:.0f}" for key in ("_issue_ms", "_ms")]

    assert (
        "BF16's fetch after {} ms of {}, QAT's after {} of {}, and before that commit after {} of "
        "{}."
    ).format(*fetch_ms(now, "bf16"), *fetch_ms(now, "qat"), *fetch_ms(before, "qat")) in PAGE
    shapes = ("qwen3-8b", "qwen3-30b-a3b")
    dense, moe = (of_bf16(now, shape) for shape in shapes)
    dense_before, moe_before = (of_bf16(before, shape) for shape in shapes)
    assert (
        f"a fetch took {dense_before['fetch']} times BF16's time and log-probs "
        f"{dense_before['log-probs']} times; now {dense['fetch']} and {dense['log-probs']}."
    ) in PAGE
    assert (
        f"it was {moe_before['fetch']} and {moe_before['log-probs']} times; now {moe['fetch']} and "
        f"{moe['log-probs']}."
    ) in PAGE
    assert (
        f"{dense['training']} and {moe['training']} times, before {dense_before['training']} and "
        f"{moe_before['training']}."
    ) in PAGE
