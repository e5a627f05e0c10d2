"""What a study file may say: one pydantic model per section; `checks` looks across them.

A study is read in a dry run too, so nothing here imports torch. Paths in a study are relative
to the repository root.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from experiments.rl.config import Correction, EvaluationConfig, GrpoConfig, Settings, TaskConfig
from experiments.study.arms import ARMS, ArmName
from experiments.study.models import Model, ModelName
from experiments.study.verl_settings import Setting, load_recipe
from qat_core.options import BlockScaleMethod, ScalePolicy
from qat_core.planning.predicted_memory import VLLM_VOCABULARY_MULTIPLE

ROOT = Path(__file__).resolve().parents[2]
STUDY_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
Seed = Annotated[int, Field(ge=0, lt=2**31)]  # multiplied with a prime in 64 bits
STUDIES = ROOT / "experiments" / "studies"


class Claims(Settings):
    """The tolerances of the claims that the study tests."""

    reward_gain: float = Field(0.2, ge=0, description="BF16 arm: rise of the mean reward, at least")
    qat_kl_ratio: float = Field(2.0, gt=0, description="QAT k3 KL over BF16's, at most")
    noqat_kl_ratio: float = Field(30.0, gt=0, description="no-QAT k3 KL over BF16's, at least")
    accuracy_log_odds: float = Field(
        0.3, gt=0, description="QAT against BF16, both in BF16: within"
    )
    served_log_odds: float = Field(
        0.3, gt=0, description="QAT in NVFP4 against BF16 in BF16: lost at most"
    )
    weight_memory_error: float = Field(0.005, gt=0, description="predicted against measured")


class KlGate(Settings):
    """When a run is stopped because trainer and rollouts have diverged."""

    max_k3_kl: float = Field(gt=0, description="nats a token; what is undefined counts as more")
    steps: int = Field(ge=1, description="steps in a row beyond it that stop the run")


class Cell(Settings):
    """One cell of a grid: settings of `rl` that it replaces, in some of the models and arms."""

    models: tuple[ModelName, ...] | None = Field(None, description="by default all of the study")
    arms: tuple[ArmName, ...] | None = Field(None, description="by default all of the study")
    steps: PositiveInt | None = None
    lr: PositiveFloat | None = None
    advantage: Literal["group", "reward"] | None = None
    correction: Correction | None = None
    rollout_is_threshold: PositiveFloat | None = None
    rollout_rs_band: tuple[float, float] | None = None
    routing_replay: bool | None = None

    def replaced(self) -> dict[str, Any]:
        """What it says of `rl`, by key."""
        return self.model_dump(exclude={"models", "arms"}, exclude_none=True)


class Run(NamedTuple):
    """One run of a study; `cell` names its cell where the study is a grid of them."""

    model: str
    arm: ArmName
    seed: int
    cell: str | None = None

    @property
    def id(self) -> str:
        """Name of the run's folder, and tag `run` of its MLflow run."""
        arm = f"{self.arm}.{self.cell}" if self.cell else self.arm
        return f"{self.model}_{arm}_seed{self.seed}"


class Base(NamedTuple):
    """A base checkpoint of a study."""

    model: str
    seed: int


CellName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")]
OneOrMore = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]


class Study(Settings):
    """A study: every model under every arm with every seed, in every cell if it has some."""

    study: str = Field(pattern=STUDY_NAME_PATTERN, description="name of the study")
    trainer: Literal["local", "verl"] = "local"
    rollout: Literal["eager", "vllm"] = "eager"
    device: Literal["cpu", "cuda"] = "cpu"
    gpus: int = Field(
        1, ge=1, le=100_000, description="trainer verl: GPUs of a run, on CPU its workers"
    )
    variant: OneOrMore = Field(
        (), description="trainer verl: a file of recipes/variants, or several, the last one decides"
    )
    kl_gate: KlGate | None = Field(None, description="trainer verl: stops a run that has diverged")
    models: dict[ModelName, Model]
    arms: tuple[ArmName, ...]
    seeds: tuple[Seed, ...]
    own_base: bool = Field(False, description="a base checkpoint for each seed, not one for all")
    cells: dict[CellName, Cell] = Field({}, description="a grid over settings of rl, in order")
    gpu_memory_gib: PositiveFloat | None = Field(
        None,
        description="on cuda: what one run takes of each of its GPUs, in whole GiB; runs then "
        "share them",
    )
    exact: bool = Field(
        False, description="in every arm training computes the bits of vLLM's rollouts"
    )
    scale_policy: ScalePolicy = "pow2"
    block_scale_method: BlockScaleMethod = "max"
    task: TaskConfig
    rl: GrpoConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    judged_by: Literal["parity", "collapse"] = Field(
        "parity", description="parity: section claims; collapse: docs/protocols/collapse.md"
    )
    primary: Literal["C1", "C4", "C9", "C12"] = Field(
        "C1",
        description="judged_by collapse: the claim that decides; C4: with C10 and C11, is QAT as "
        "safe as BF16; C9: with C10, on rewards; C12: with C13 and C14, exact against inexact",
    )
    protocol: Path | None = Field(
        None, description="the page that was written before the runs, whose manifests know it"
    )
    claims: Claims = Claims()

    def training_config(self, run: Run) -> dict[str, Any]:
        """All settings that decide a run's training, resolved, ready for JSON."""
        shared = self.model_dump(
            mode="json",
            include={"trainer", "rollout", "device", "scale_policy", "block_scale_method"},
        )
        named = {key: value for key, value in run._asdict().items() if value is not None}
        return {
            **named,
            **shared,
            **({"exact": True} if self.is_exact(run.arm) else {}),
            "task": self.task.model_dump(mode="json"),
            "rl": self.rl_of(run.cell).model_dump(mode="json"),
            "source": self.models[run.model].training_config(),
            **(self._verl_config(run) if self.trainer == "verl" else {}),
        }

    def is_exact(self, arm: ArmName) -> bool:
        """Whether an arm's training computes the bits of vLLM's rollouts."""
        return self.exact or ARMS[arm].is_exact

    def rl_of(self, cell: str | None) -> GrpoConfig:
        """The settings of `rl` in a cell; ValidationError where they do not fit together."""
        if cell is None:
            return self.rl
        return GrpoConfig.model_validate(self.rl.model_dump() | self.cells[cell].replaced())

    def key_of(self, cell: str | None, key: str) -> str:
        """The dotted key that sets what `rl_of` has as `key`."""
        is_replaced = cell is not None and key in self.cells[cell].replaced()
        return f"cells.{cell}.{key}" if is_replaced else f"rl.{key}"

    @property
    def bases(self) -> dict[str, Base]:
        """The base checkpoints by name, which is their folder's."""
        if not self.own_base:
            return {model: Base(model, 0) for model in self.models}
        return {f"{m}_seed{seed}": Base(m, seed) for m in self.models for seed in self.seeds}

    def base_of(self, run: Run) -> str:
        """Name of the base checkpoint that a run starts from."""
        return f"{run.model}_seed{run.seed}" if self.own_base else run.model

    @property
    def measures_engine(self) -> bool:
        """Whether measured weight memory is what vLLM holds, not what was streamed to an engine."""
        # on a CPU verl's engine counts what it is given, see qat_core/verl/worker.py
        return self.trainer == "verl" and self.device == "cuda"

    @property
    def vocabulary_multiple(self) -> int:
        """What the vocabulary is padded to a multiple of where weight memory is measured."""
        return VLLM_VOCABULARY_MULTIPLE if self.measures_engine else 1

    def _verl_config(self, run: Run) -> dict[str, Any]:
        own = self.model_dump(mode="json", include={"gpus", "kl_gate"})
        recipe = self.recipe_of(run)
        # MLflow takes no "+" in the name of a parameter
        return own | {"recipe": {key.replace("+", ""): s.value for key, s in recipe.items()}}

    def recipe_of(self, run: Run) -> dict[str, Setting]:
        """What the recipe of a verl run sets, by verl's keys."""
        recipe = self.models[run.model].recipe
        assert recipe is not None, "required with trainer: verl"
        return load_recipe(recipe, self.variant)

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, in the order of the file; in a cell, the arms of a seed follow each other."""
        if self.cells:
            return tuple(
                Run(model, arm, seed, name)
                for name, cell in self.cells.items()
                for model in cell.models or self.models
                for seed in self.seeds
                for arm in cell.arms or self.arms
            )
        return tuple(
            Run(model, arm, seed)
            for model in self.models
            for arm in self.arms
            for seed in self.seeds
        )

    @property
    def shares_jobs(self) -> bool:
        """Whether the arms of a model and seed are small enough for one job: it imports once."""
        here = (self.trainer, self.rollout, self.device) == ("local", "eager", "cpu")
        return here and not self.cells

    def find_run(self, run_id: str) -> Run:
        """The run of that id."""
        runs = {run.id: run for run in self.runs}
        if run_id not in runs:
            raise ValueError(
                f"--run: study {self.study} has no run {run_id!r}; it has {', '.join(runs)}"
            )
        return runs[run_id]
