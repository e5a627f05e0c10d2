"""The table of README: at most eight rows of one number, one interval and one link each."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from analysis.benchmark_records import read_record, record_paths
from analysis.claims_table import Claim, read_table, show_ratio
from analysis.collapse.rules import AREA_LEVEL, AREA_MARGIN
from analysis.markdown import Row, markdown_table
from analysis.stats import LEVEL
from analysis.tables.rows import RowsRecord, engines_of, number, read_records, read_servings
from experiments.runs.summary import KL_RATIO, Estimate

STUDY = "collapse-smollm2-confirm"  # of the pretrained model, ten seeds
MACHINE, MODEL = "h200", "qwen3-30b-a3b"
EXACT = f"zero_mismatch_{MACHINE}*.json"  # of one GPU and of two
AT_ONCE = 256  # sequences
SPEED = "of_bf16.tokens_per_s."  # of the exact engine, and how many sequences at once
STEPS = ("_8b_exact", "", "_8b_reload", "_2gpus")  # of records of verl's steps, the newest first
NOTE = (
    "k3 KL: an estimate of KL(rollout || trainer). Mismatch and reward: SmolLM2-135M, ten seeds. "
    f"Intervals: {100 * LEVEL:g} % of ratios, {100 * AREA_LEVEL:g} % of differences. The margin "
    "was fixed before these runs. All results and costs, and what failed: "
    "[results](docs/results.md), [performance](docs/performance.md)."
)


def _row(what: str, value: str, interval: str, page: str) -> Row:
    return {
        "What": what,
        "Measured": f"**{value}**",
        "Interval or range": interval,
        "More": f"[more]({page})",
    }


def front_text(records: Path) -> str:
    """Markdown of the rows; that of the exact mode is there when its record is."""
    return f"{markdown_table(_rows(records))}\n\n{NOTE}\n"


def _rows(records: Path) -> Iterator[Row]:
    benchmarks = records / "benchmarks"
    engines = engines_of(read_servings(benchmarks, MACHINE))
    bf16_gib, packed_gib = (
        number(engines[f"{MODEL}:{it}"], "weight_gib") for it in ("bf16", "nvfp4")
    )
    yield _row(
        "Weight memory of rollouts, Qwen3-30B-A3B",
        f"{1 - packed_gib / bf16_gib:.0%} less",
        f"{packed_gib:.1f} of {bf16_gib:.1f} GiB",
        "docs/performance.md#weight-memory-and-weight-syncs",
    )
    table = read_table(records / STUDY / "claims.json")
    ratios = {it.arm: it.estimates[KL_RATIO] for it in table.arms if KL_RATIO in it.estimates}
    page = f"experiments/records/{STUDY}/README.md"
    for arm, words in (("nvfp4-noqat", "without QAT"), ("nvfp4-qat", "with QAT")):
        yield _row(f"Mismatch (k3 KL) {words}, over BF16's", *_ratio(ratios[arm]), page)
    if paths := record_paths(benchmarks, EXACT):
        yield _exact(paths)
    claims = {it.name: it for it in table.claims}
    yield _row("Mean reward, no QAT less QAT", *_difference(claims["C9"]), page)
    within = f"Mean reward, QAT less BF16 (margin {AREA_MARGIN:g})"
    yield _row(within, *_difference(claims["C4"]), page)
    yield _training(benchmarks)
    yield _decoding(benchmarks)


def _ratio(it: Estimate) -> tuple[str, str]:
    assert it.low is not None and it.high is not None, "of several seeds"
    return show_ratio(it.estimate), f"{show_ratio(it.low)} to {show_ratio(it.high)}"


def _difference(claim: Claim) -> tuple[str, str]:
    assert claim.estimate is not None and claim.low is not None and claim.high is not None
    return f"{claim.estimate:+.3f}", f"{claim.low:+.3f} to {claim.high:+.3f}"


def _exact(paths: Sequence[Path]) -> Row:
    """Of all comparisons that have to be zero, controls not counted."""
    compared = (row for path in paths for row in read_record(path, RowsRecord).rows)
    rows = [it for it in compared if it["expected_zero"]]
    unequal, tokens = (int(sum(number(it, key) for it in rows)) for key in ("unequal", "tokens"))
    return _row(
        "Exact mode: log-probs of sampled tokens that differ in any bit",
        f"{unequal:,}",
        f"of {tokens:,} compared",
        "docs/exact.md",
    )


def _training(benchmarks: Path) -> Row:
    """Of Qwen3-8B's shape through verl; the range is that of the recordings, one run an arm."""
    ratios = []
    for name in STEPS:
        runs = read_record(benchmarks / f"verl_{MACHINE}{name}.json", RowsRecord).rows
        step_s = {it["arm"]: number(it, "step_s") for it in runs}
        ratios.append(step_s["nvfp4-qat"] / step_s["bf16"])
    return _row(
        "Time of a verl step with QAT over BF16's, Qwen3-8B",
        show_ratio(ratios[0]),
        f"{show_ratio(min(ratios))} to {show_ratio(max(ratios))}: {len(ratios)} recordings",
        "docs/performance.md#qwen3-at-true-size-through-verl",
    )


def _decoding(benchmarks: Path) -> Row:
    """Of the exact mode; the range is that of two models and of numbers of sequences."""
    servings = read_records(benchmarks, MACHINE, "serving_exact_8b", "serving_exact_30b")
    exact = {name: it for name, it in engines_of(servings).items() if name.endswith(":exact")}
    speeds = [number(it, key) for it in exact.values() for key in it if key.startswith(SPEED)]
    return _row(
        f"Exact mode, 4 bits: decoding speed over BF16's, Qwen3-30B-A3B, {AT_ONCE} sequences",
        show_ratio(number(exact[f"{MODEL}:exact"], f"{SPEED}{AT_ONCE}")),
        f"{show_ratio(min(speeds))} to {show_ratio(max(speeds))}: Qwen3-8B too, 1 to {AT_ONCE}",
        "docs/exact.md#what-it-costs",
    )
