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


SECTIONS: Mapping[str, Callable[[Path, str], list[str]]] = {
    "benchmarks": engine_and_parity_sections,
    "syncs": sync_sections,
    "parity": parity_sections,
    "zero_mismatch": zero_mismatch_sections,
    "verl": rows_sections("verl"),
    "gpus": gpus_sections,
    "memory": memory_sections,
    "goals": goals_sections,
    "tiles": rows_sections("humming_tiles", "humming_tiles_*"),
    "codec": rows_sections("codec"),
    "cost": rows_sections("parameter"),
    "cost_exact": rows_sections("parameter_exact"),
    "serving_exact": rows_sections("serving_exact_8b", "serving_exact_30b"),
    "exact_products": rows_sections("exact_products"),
    "cost_sharded": rows_sections("fsdp"),
    "repeated_syncs": rows_sections("bitwise", "bitwise_*"),
    "verl_replay": rows_sections("verl_replay"),
    # benchmarks of docs/history.md
    "gradients": rows_sections("gradients"),
    "offload": rows_sections("offloaded_steps"),
    "matmul": rows_sections("matmul"),
    "equal_bits": rows_sections("equal_bits"),
    "routing_replay": rows_sections("routing_replay"),
    "main_job": rows_sections("main_job"),
    "simulation": rows_sections("simulation"),
    "simulated_sizes": rows_sections("simulated_sizes"),
    "simulated_accuracy": rows_sections("simulated_accuracy"),
    "simulated_rewards": rows_sections("simulated_rewards"),
}


def benchmark_text(kind: str, folder: Path, machine: str) -> str:
    """Markdown of one kind of SECTIONS.

    Args:
        kind: a key of SECTIONS.
        folder: holds the records.
        machine: how their names end, e.g. `h200` for rollout_h200.json; for simulations the size of
            a study.
    """
    sections = SECTIONS[kind]
    try:
        return "\n\n".join(sections(folder, machine)) + "\n"
    except LookupError as error:  # of a table's columns: their types name the file themselves
        raise ValueError(
            f"{folder}: a record of {kind} on {machine} lacks {error}; run the benchmark again"
        ) from None
