"""Table of verl runs on a GPU without and with routing replay."""

from pathlib import Path

from analysis.markdown import MarkdownTable
from analysis.tables.record import read_record
from analysis.tables.verl import VerlRecord, VerlRun, origin_of

REPLAYED = "-r3"  # how models of studies with replay end
TABLE: MarkdownTable[VerlRun] = MarkdownTable(
    {
        "Model": lambda run: run.model.removesuffix(REPLAYED),
        "Arm": lambda run: run.arm,
        "Replay": lambda run: "yes" if run.model.endswith(REPLAYED) else "no",
        "Steps": lambda run: run.progress,
        "k3 KL, mean": lambda run: f"{run.mean_k3_kl:.2e}",
        "Median step": lambda run: f"{run.k3_kl.median:.2e}",
        "Largest step": lambda run: f"{run.k3_kl.high:.2e}",
        "Commit": lambda run: run.git.commit[:7],
    }
)
NOTE = (
    "One run an arm, from the same base checkpoint. Mean: over all tokens of all steps. Median and "
    "largest: of all steps but the first. Their times say nothing: seven runs and more shared the "
    "GPU."
)


def verl_replay_sections(folder: Path, machine: str) -> list[str]:
    """`verl_replay_MACHINE.json`, a row a run, arm by arm.

    Raises:
        ValueError: the record is missing or damaged.
    """
    record = read_record(folder / f"verl_replay_{machine}.json", VerlRecord)
    runs = sorted(record.runs, key=lambda run: (run.arm, run.model))
    return [f"Measured on: {origin_of(record)}.", TABLE.markdown(runs), NOTE]
