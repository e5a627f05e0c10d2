"""Benchmark records to Markdown: every kind of table by the name that a document asks for."""

from collections.abc import Callable, Mapping
from pathlib import Path

from analysis.tables.goals import goals_sections
from analysis.tables.gpus import gpus_sections
from analysis.tables.memory import memory_sections
from analysis.tables.parity import parity_sections
from analysis.tables.rows import rows_sections
from analysis.tables.zero_mismatch import zero_mismatch_sections

sync_sections = rows_sections("rollout", "rollout_*")
serving_sections = rows_sections("serving_8b", "serving_30b")


def engine_and_parity_sections(folder: Path, machine: str) -> list[str]:
    """Weight syncs, serving and parity of one machine."""
    kinds = (sync_sections, serving_sections, parity_sections)
    return [text for sections in kinds for text in sections(folder, machine)]


# the last two lines: benchmarks of docs/history.md
NAMED_AS_RECORDED = (
    *("verl", "codec", "exact_products", "verl_replay"),
    *("gradients", "matmul", "equal_bits", "routing_replay", "main_job", "simulation"),
    *("simulated_sizes", "simulated_accuracy", "simulated_rewards"),
)
SECTIONS: Mapping[str, Callable[[Path, str], list[str]]] = {
    "benchmarks": engine_and_parity_sections,
    "syncs": sync_sections,
    "serving": rows_sections("serving_8b"),
    "parity": parity_sections,
    "zero_mismatch": zero_mismatch_sections,
    "gpus": gpus_sections,
    "memory": memory_sections,
    "goals": goals_sections,
    "tiles": rows_sections("humming_tiles", "humming_tiles_*"),
    "cost": rows_sections("parameter"),
    "cost_exact": rows_sections("parameter_exact"),
    "serving_exact": rows_sections("serving_exact_8b", "serving_exact_30b"),
    "cost_sharded": rows_sections("fsdp"),
    "repeated_syncs": rows_sections("bitwise", "bitwise_*"),
    "offload": rows_sections("offloaded_steps"),
    **{name: rows_sections(name) for name in NAMED_AS_RECORDED},
}


def benchmark_text(kind: str, folder: Path, machine: str) -> str:
    """Markdown of one kind of SECTIONS, from records in a folder.

    How their names end is a machine, e.g. `h200` for rollout_h200.json, the size of a study, or a
    version of vLLM on an H200.
    """
    sections = SECTIONS[kind]
    try:
        return "\n\n".join(sections(folder, machine)) + "\n"
    except LookupError as error:  # of a table's columns: their types name the file themselves
        raise ValueError(
            f"{folder}: a record of {kind} on {machine} lacks {error}; run the benchmark again"
        ) from None
