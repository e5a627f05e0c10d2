"""The rungs of the ladder, from their study files, for the page of its protocol.

Only what stands before the first run of all: another table is another protocol.
"""

from pathlib import Path

from analysis.collapse.grid import NOQAT
from analysis.ladder.sizes import config_of, num_parameters
from analysis.markdown import Row, markdown_table
from experiments.study.load import load_study
from experiments.study.preview import show_seeds
from experiments.study.schema import STUDIES


def plan_text() -> str:
    """Markdown: a row for each rung, by size."""
    paths = filter(_is_rung, STUDIES.glob("ladder*.yaml"))
    found = sorted(map(_row, paths), key=lambda it: it[:2])
    return markdown_table(row for _, _, row in found) + "\n"


def _is_rung(path: Path) -> bool:
    """Whether a study compares arms, without corrections."""
    study = load_study(path)
    return NOQAT in study.arms and {study.rl_of(it).correction for it in study.cells} == {"none"}


def _row(path: Path) -> tuple[int, str, Row]:
    """Its size and name, by which rows are ordered, and the row."""
    study = load_study(path)
    config = config_of(study)
    experts, active = config.get("num_experts"), config.get("num_experts_per_tok")
    size = num_parameters(config)
    return (
        size,
        path.stem,
        {
            "Study": f"`{path.stem}`",
            "Parameters": f"{size:,}",
            "Layers x width": f"{config['num_hidden_layers']} x {config['hidden_size']}",
            "Experts (active)": f"{experts} ({active})" if experts else "-",
            "Seeds": show_seeds(study.seeds),
            "Steps": str(study.rl.steps),
            "Arms": ", ".join(study.arms),
        },
    )
