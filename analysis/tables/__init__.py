"""Benchmark records to Markdown: every kind of table by the name that a document asks for."""

from collections.abc import Callable, Mapping
from pathlib import Path

from analysis.tables.engines import read_rollouts, sync_sections, syncs_alone_sections
from analysis.tables.equal_bits import equal_bits_sections
from analysis.tables.goals import goals_sections
from analysis.tables.gpus import gpus_sections
from analysis.tables.matmul import matmul_sections
from analysis.tables.memory import memory_sections
from analysis.tables.parity import parity_sections, read_parity
from analysis.tables.record import setups
from analysis.tables.repeated_syncs import repeated_sync_sections
from analysis.tables.routing_replay import replay_sections
from analysis.tables.rows import rows_sections
from analysis.tables.serving import read_servings, serving_sections
from analysis.tables.simulation import (
    accuracy_sections,
    chosen_sections,
    reward_sections,
    simulation_sections,
)
from analysis.tables.tiles import tiles_sections
from analysis.tables.verl import verl_sections
from analysis.tables.verl_replay import verl_replay_sections


def engine_and_parity_sections(folder: Path, machine: str) -> list[str]:
    """Weight syncs, serving and parity of one machine."""
    rollouts, servings = read_rollouts(folder, machine), read_servings(folder, machine)
    parity, models = read_parity(folder, machine)
    return [
        setups([*rollouts, *servings, *parity]),
        *sync_sections(rollouts),
        *serving_sections(servings),
        *parity_sections(models),
    ]


def parity_alone_sections(folder: Path, machine: str) -> list[str]:
    """Parity of a machine on which nothing was served."""
    records, models = read_parity(folder, machine)
    return [setups(records), *parity_sections(models)]


SECTIONS: Mapping[str, Callable[[Path, str], list[str]]] = {
    "benchmarks": engine_and_parity_sections,
    "syncs": syncs_alone_sections,
    "parity": parity_alone_sections,
    "verl": verl_sections,
    "gpus": gpus_sections,
    "memory": memory_sections,
    "goals": goals_sections,
    "matmul": matmul_sections,
    "tiles": tiles_sections,
    "equal_bits": equal_bits_sections,
    "codec": rows_sections("codec"),
    "cost": rows_sections("parameter"),
    "cost_sharded": rows_sections("fsdp"),
    "offload": rows_sections("offloaded_steps"),
    "repeated_syncs": repeated_sync_sections,
    "routing_replay": replay_sections,
    "verl_replay": verl_replay_sections,
    "simulation": simulation_sections,
    "simulated_sizes": chosen_sections,
    "simulated_accuracy": accuracy_sections,
    "simulated_rewards": reward_sections,
}


def benchmark_text(kind: str, folder: Path, machine: str) -> str:
    """Markdown of one kind of SECTIONS.

    Args:
        kind: a key of SECTIONS.
        folder: holds the records.
        machine: how their names end, e.g. `h200` for rollout_h200.json; for simulations the size of
            a study.

    Raises:
        ValueError: a record is missing or damaged; the message names it.
    """
    sections = SECTIONS[kind]
    try:
        return "\n\n".join(sections(folder, machine)) + "\n"
    except LookupError as error:  # of a table's columns: their types name the file themselves
        raise ValueError(
            f"{folder}: a record of {kind} on {machine} lacks {error}; run the benchmark again"
        ) from None
