"""What a study file may say: one pydantic model a section, every mistake named in one line.

A study is read in a dry run too, so nothing here imports torch. Paths in a study are relative
to the repository root.
"""

from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import Field, NonNegativeInt, model_validator

from experiments.study_file import parse_yaml_file
from qat_core.memory import Precision
from qat_core.rl.config import EvaluationConfig, GrpoConfig, PretrainConfig, Settings, TaskConfig

ROOT = Path(__file__).resolve().parents[1]

ArmName = Literal["bf16", "nvfp4-noqat", "nvfp4-qat", "nvfp4-qat-ffn"]
ARM_NAMES: tuple[ArmName, ...] = get_args(ArmName)
# what an arm's rollout engine packs; None: nothing
PACKED_PRECISION: dict[ArmName, Precision | None] = {
    "bf16": None,
    "nvfp4-noqat": "full",
    "nvfp4-qat": "full",
    "nvfp4-qat-ffn": "ffn",
}

# "_" separates the parts of a run id, so a model's name must not hold one.
MODEL_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9.-]*$"
ModelName = Annotated[str, Field(pattern=MODEL_NAME_PATTERN)]


class ScratchModel(Settings):
    """A small model trained from random weights by a rule of the pipeline."""

    kind: Literal["scratch"]
    config: Path = Field(description="Hugging Face config.json of the architecture")
    pretrain: PretrainConfig


class GgufModel(Settings):
    """A pretrained model inside a GGUF file that a Python package ships."""

    kind: Literal["gguf"]
    package: str = Field(description="importable name of the package that holds the file")
    file: str = Field(description="path of the GGUF file inside the package")
    pretrain: PretrainConfig | None = Field(
        None, description="supervised training on the task's answers, for weak chat models"
    )


class HubModel(Settings):
    """A published checkpoint, named by its repository; its shapes come from a local config."""

    kind: Literal["hub"]
    config: Path = Field(description="Hugging Face config.json of the architecture")
    repo: str = Field(description="owner/name of the checkpoint on the Hugging Face Hub")


Model = Annotated[ScratchModel | GgufModel | HubModel, Field(discriminator="kind")]
MODEL_KINDS: dict[str, type[Settings]] = {
    "scratch": ScratchModel,
    "gguf": GgufModel,
    "hub": HubModel,
}


class Claims(Settings):
    """The tolerances of the claims that the study tests."""

    reward_gain: float = Field(0.2, ge=0, description="BF16 arm: rise of the mean reward, at least")
    qat_kl_ratio: float = Field(2.0, gt=0, description="QAT k3 KL over BF16's, at most")
    noqat_kl_ratio: float = Field(30.0, gt=0, description="no-QAT k3 KL over BF16's, at least")
    accuracy_margin: float = Field(0.05, gt=0, lt=1, description="equivalence margin, offline")
    weight_memory_error: float = Field(0.005, gt=0, description="predicted against measured")


class Run(NamedTuple):
    """One run of a study."""

    model: str
    arm: ArmName
    seed: int

    @property
    def id(self) -> str:
        """Folder, MLflow run name, legend and table row of the run."""
        return f"{self.model}_{self.arm}_seed{self.seed}"


class Study(Settings):
    """A study: every model under every arm with every seed."""

    study: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="name of the study")
    trainer: Literal["local", "verl"] = "local"
    rollout: Literal["eager", "vllm"] = "eager"
    device: Literal["cpu", "cuda"] = "cpu"
    models: dict[ModelName, Model]
    arms: tuple[ArmName, ...]
    seeds: tuple[NonNegativeInt, ...]
    scale: Literal["pow2", "amax"] = "pow2"
    block_scale: Literal["max", "four_over_six", "mse"] = "max"
    task: TaskConfig
    rl: GrpoConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    claims: Claims = Claims()

    @model_validator(mode="after")
    def _check_across_sections(self) -> Self:
        _check_list("models", tuple(self.models))
        _check_list("arms", self.arms)
        _check_list("seeds", self.seeds)
        for name, model in self.models.items():
            if not isinstance(model, GgufModel) and not (ROOT / model.config).is_file():
                raise ValueError(
                    f"models.{name}.config: no file {model.config}; paths are relative to the "
                    "repository root"
                )
            if self.trainer == "local" and isinstance(model, HubModel):
                raise ValueError(
                    f"models.{name}.kind: the local trainer loads no hub checkpoint; use "
                    "trainer: verl, or kind: scratch or gguf"
                )
        if self.rl.prompts_per_step % self.rl.mini_batch_prompts:
            raise ValueError(
                f"rl.mini_batch_prompts: {self.rl.mini_batch_prompts} does not divide "
                f"rl.prompts_per_step, {self.rl.prompts_per_step}; use one of its divisors"
            )
        return self

    def training_config(self, run: Run) -> dict[str, Any]:
        """All settings that decide a run's training, resolved, ready for JSON."""
        shared = self.model_dump(
            mode="json", include={"trainer", "rollout", "device", "scale", "block_scale"}
        )
        sections = {"task": self.task, "rl": self.rl, "source": self.models[run.model]}
        return {
            **run._asdict(),
            **shared,
            **{name: section.model_dump(mode="json") for name, section in sections.items()},
        }

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, in the order of the file."""
        return tuple(
            Run(model, arm, seed)
            for model in self.models
            for arm in self.arms
            for seed in self.seeds
        )

    def find_run(self, run_id: str) -> Run:
        """The run of that id.

        Raises:
            ValueError: the study has no such run.
        """
        runs = {run.id: run for run in self.runs}
        if run_id not in runs:
            raise ValueError(
                f"--run: study {self.study} has no run {run_id!r}; it has {', '.join(runs)}"
            )
        return runs[run_id]


def _check_list(key: str, values: tuple[Hashable, ...]) -> None:
    if not values:
        raise ValueError(f"{key}: empty; name at least one")
    repeated = [value for value, count in Counter(values).items() if count > 1]
    if repeated:
        raise ValueError(f"{key}: {repeated[0]} is listed twice; remove one")


def load_study(path: Path) -> Study:
    """Reads and checks a study file.

    Raises:
        ValueError: one line a mistake, "<file>: <dotted key>: <what>; <mend>".
    """
    return parse_yaml_file(path, Study, MODEL_KINDS)


def require_executable(study: Study, path: Path) -> None:
    """Raises ValueError where a study can be planned but not yet executed."""
    if study.trainer == "verl":
        raise ValueError(
            f"{path}: trainer: verl studies can only be planned (snakemake -n) in this version; "
            "use trainer: local to execute one"
        )
    if study.rollout == "vllm":
        raise ValueError(
            f"{path}: rollout: vllm is not served by the local trainer in this version; use eager"
        )
