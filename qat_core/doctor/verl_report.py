"""The signs of a recorded run as a table for people."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from qat_core.doctor.verl_run import Judgement

STYLES = {"fault": "bold red", "warning": "yellow", "none": "", "not recorded": "dim"}


def show_run(judged: Judgement, console: Console) -> None:
    """Prints all signs, then what to do about those that are faults."""
    table = Table("sign", "evidence", "verdict")
    for sign in judged.signs:
        cells = (sign.title, sign.evidence, sign.verdict)
        table.add_row(*map(Text, cells), style=STYLES[sign.verdict])
    console.print(table)
    for sign in judged.signs:
        if sign.advice:
            console.print(Text(f"{sign.title}: {sign.advice}", style=STYLES[sign.verdict]))
    if judged.is_healthy:
        console.print(f"No fault found in {judged.num_steps} steps.")
