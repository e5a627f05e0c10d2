"""Speeds of serving that README and pages state in sentences are of the records."""

from functools import cache

import pytest

from analysis.tables.serving import Served, read_servings, served
from tests.unit.analysis.readme import RECORDS, TEXT, benchmark, one_line

BATCHES = ("1", "32", "256")


@cache
def rows() -> dict[str, Served]:
    records = read_servings(RECORDS / "benchmarks", "h200")
    return {row.name: row for record in records for row in served(record)}


def decoding(name: str, batches: tuple[str, ...] = BATCHES) -> list[str]:
    """Tokens a second over BF16's."""
    row = rows()[name]
    return [f"{row.speed_ratio(lambda it, b=b: it.tokens_per_s[b][1]):.2f}" for b in batches]


def prefill(name: str) -> str:
    """Tokens a second over BF16's."""
    return f"{rows()[name].speed_ratio(lambda it: it.prefill):.2f}"


def listed(numbers: list[str]) -> str:
    return f"{', '.join(numbers[:-1])} and {numbers[-1]}"


def longer_percent(name: str, prompts: int) -> int:
    """Seconds of the rollouts of a step, over BF16's."""
    own, floor = rows()[name].engine, rows()[name].floor
    assert floor is not None
    return round(100 * (own.rollouts[prompts].seconds / floor.rollouts[prompts].seconds - 1))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("qwen3-8b", "decodes at {} and {} times"),
        ("qwen3-30b-a3b", "Qwen3-30B-A3B at {} and {};"),
    ],
)
def test_readme(model: str, sentence: str) -> None:
    names = [f"{model}:{kind}" for kind in ("nvfp4", "humming")]
    largest = [decoding(name, ("256",))[0] for name in names]
    assert sentence.format(*largest) in TEXT
    assert "{} and {}".format(*map(prefill, names)) in TEXT.partition("prefill runs at ")[2][:60]


def test_readme_on_experts_by_humming() -> None:
    name = "qwen3-30b-a3b:humming-experts"
    (largest,) = decoding(name, ("256",))
    assert f"decodes at {largest} times BF16's speed and prefill runs at {prefill(name)}." in TEXT
    run, floor = (
        next(it for it in benchmark("verl_h200_8b_humming")["runs"] if it["arm"] == arm)
        for arm in ("nvfp4-qat", "bf16")
    )
    ratio = run["mean_k3_kl"] / floor["mean_k3_kl"]
    assert f"k3 KL is {ratio:.2f} times BF16's at Qwen3-8B's shape" in TEXT


def test_switches() -> None:
    moe, dense = "qwen3-30b-a3b", "qwen3-8b"
    text = one_line("docs/verl.md")
    assert (
        f"at {listed(decoding(f'{moe}:humming'))} times BF16's speed with 1, 32 and 256 sequences "
        f"(experts alone: {listed(decoding(f'{moe}:humming-experts'))}; Marlin: "
        f"{listed(decoding(f'{moe}:nvfp4'))})"
    ) in text
    assert (
        f"decodes at {listed(decoding(f'{dense}:humming'))} times BF16's speed (Marlin: "
        f"{listed(decoding(f'{dense}:nvfp4'))}), and rollouts of 256 or 1,024 prompts take "
        f"{longer_percent(f'{dense}:humming', 256)} % and "
        f"{longer_percent(f'{dense}:humming', 1024)} % longer"
    ) in text
    shorter = [-longer_percent(f"{moe}:humming-experts", count) for count in (256, 1024)]
    by_marlin = [-longer_percent(f"{moe}:nvfp4", count) for count in (256, 1024)]
    assert (
        "take {} and {} % less time than in BF16 (256 and 1,024 prompts), with Marlin {} and {} %"
    ).format(*shorter, *by_marlin) in text
    names = [f"{moe}:{kind}" for kind in ("humming-experts", "nvfp4")]
    experts, marlin = (rows()[name].engine.tokens_per_s for name in names)
    more = [f"{100 * (experts[batch][1] / marlin[batch][1] - 1):.0f}" for batch in BATCHES]
    faster = f"{listed(more)} % more tokens a second than"
    assert f"{faster} with Marlin at 1, 32 and 256 sequences" in text
    assert f"{faster} Marlin on an H200" in one_line("docs/performance.md")
    assert f"at {prefill(names[0])} times its speed, as linear" in text


def test_rollouts_of_a_step() -> None:
    text = one_line("docs/performance.md")
    first, second = (longer_percent("qwen3-8b:humming", count) for count in (256, 1024))
    assert (
        f"takes {first} % longer than BF16 for 256 prompts and {second} % longer for 1,024" in text
    )
    less = [
        -longer_percent(f"qwen3-30b-a3b:{kind}", count)
        for kind in ("humming", "humming-experts", "nvfp4")
        for count in (256, 1024)
    ]
    assert (
        "takes {} % less time than BF16 for 256 prompts and {} % less for 1,024; with experts "
        "alone by Humming {} and {} % less, with Marlin {} and {} % less"
    ).format(*less) in text


def test_steps_beside_goals() -> None:
    """A step is the time of 128 new tokens of each sequence, prefill included, over 128."""
    text = one_line("docs/performance.md")
    row = rows()["qwen3-8b:humming"]
    ratio = row.speed_ratio(lambda it: it.tokens_per_s["256"][1])
    assert f"at 256 sequences by a hair: {ratio:.3f}x of 0.93x" in text
    row = rows()["qwen3-30b-a3b:humming"]
    assert row.floor is not None
    own, floor = (1e3 / it.tokens_per_s["1"][1] for it in (row.engine, row.floor))
    assert f"Qwen3-30B-A3B, one sequence: {floor / own:.3f}x of 1.2x with Humming" in text
    assert (
        f"A step takes {own:.2f} ms, BF16's {floor:.2f}; the goal needs {floor / 1.2:.2f}." in text
    )
