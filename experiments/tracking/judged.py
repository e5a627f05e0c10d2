"""What MLflow shows of a study's claims.json, which `analysis.claims_table` writes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from experiments.runs.summary import ArmSummary
from experiments.study.schema import STUDY_NAME_PATTERN
from experiments.support.json_files import read_model

Name = Annotated[str, Field(pattern=r"^[\w. -]+$", description="MLflow takes no other characters")]


class JudgedClaim(BaseModel):
    """One claim."""

    model: Name
    name: Name
    statement: str
    estimate: float | None
    low: float | None
    high: float | None
    bound: str | None
    threshold: float | None
    verdict: Name
    detail: str = ""


class Judged(BaseModel):
    """All claims of a study."""

    study: Annotated[str, Field(pattern=STUDY_NAME_PATTERN)]
    claims: tuple[JudgedClaim, ...]
    marks: Mapping[str, tuple[str, ...]] = {}
    collapsed_at: Mapping[Name, int] = {}
    arms: tuple[ArmSummary, ...] = ()


def read_judged(path: Path) -> Judged:
    """The claims in a claims.json; ValueError names a missing or damaged file."""
    return read_model(path, Judged, "judge the study again")
