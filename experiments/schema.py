"""What a study file may say: one pydantic model a section, every mistake named in one line.

A study is read in a dry run too, so nothing here imports torch. Paths in a study are relative
to the repository root.
"""

from collections import Counter
from collections.abc import Hashable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

import yaml
from pydantic import BaseModel, Field, NonNegativeInt, ValidationError, model_validator
from pydantic_core import ErrorDetails

from qat_core.rl.config import EvaluationConfig, GrpoConfig, PretrainConfig, Settings, TaskConfig

ROOT = Path(__file__).resolve().parents[1]

ArmName = Literal["bf16", "nvfp4-noqat", "nvfp4-qat", "nvfp4-qat-ffn"]
ARM_NAMES: tuple[ArmName, ...] = get_args(ArmName)

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
    models: dict[ModelName, Model] = Field(min_length=1)
    arms: tuple[ArmName, ...] = Field(min_length=1)
    seeds: tuple[NonNegativeInt, ...] = Field(min_length=1)
    scale: Literal["pow2", "amax"] = "pow2"
    block_scale: Literal["max", "four_over_six", "mse"] = "max"
    task: TaskConfig
    rl: GrpoConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    claims: Claims = Claims()

    @model_validator(mode="after")
    def _check_across_sections(self) -> Self:
        _refuse_repeats("arms", self.arms)
        _refuse_repeats("seeds", self.seeds)
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


def _refuse_repeats(key: str, values: tuple[Hashable, ...]) -> None:
    repeated = [value for value, count in Counter(values).items() if count > 1]
    if repeated:
        raise ValueError(f"{key}: {repeated[0]} is listed twice; remove one")


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, less its habit of keeping the last of two equal keys silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key_node, deep=True) for key_node, _ in node.value]
        for key, count in Counter(keys).items():
            if count > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is there twice; remove one", node.start_mark
                )
        return super().construct_mapping(node, deep)


def load_study(path: Path) -> Study:
    """Reads and checks a study file.

    Raises:
        ValueError: one line a mistake, "<file>: <dotted key>: <what>; <mend>".
    """
    try:
        return Study.model_validate(_read_yaml(path))
    except ValidationError as error:
        lines = (f"{path}: {_describe(details)}" for details in error.errors())
        raise ValueError("\n".join(lines)) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path}: no such study file; name one such as experiments/study.yaml")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ValueError(f"{path}: line {line}: {error.problem}; mend the YAML there") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: not YAML text: {reason}; write it as UTF-8 YAML") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a mapping of keys; see experiments/study.yaml")
    return content


def _describe(details: ErrorDetails) -> str:
    """One pydantic error as "<dotted key>: <what>; <mend>"."""
    kind, given, context = details["type"], details["input"], details.get("ctx", {})
    key = ".".join(map(str, _keys_in_file(details["loc"])))
    if kind == "value_error":  # raised by a validator of ours, which names key and mend
        return str(context["error"])
    if kind == "extra_forbidden":
        return f"{key}: unknown key; {_suggest(details['loc'])}"
    if kind == "missing":
        return f"{key}: missing; add it"
    if kind == "literal_error":
        return f"{key}: {given!r} is not allowed; use {context['expected']}"
    if kind == "union_tag_not_found":
        return f"{key}.kind: missing; use one of {', '.join(MODEL_KINDS)}"
    if kind == "union_tag_invalid":
        return f"{key}.kind: {context['tag']!r} is not known; use one of {', '.join(MODEL_KINDS)}"
    rule = details["msg"].removeprefix("Input ").removeprefix("String ")
    return f"{key}: {given!r} does not fit, it {rule}; change the value"


def _keys_in_file(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Pydantic's location less what it adds below models.<name>: the kind, or "[key]"."""
    return location[:2] + location[3:] if location[:1] == ("models",) else location


def _suggest(location: tuple[int | str, ...]) -> str:
    known, unknown = sorted(_section_at(location[:-1]).model_fields), str(location[-1])
    close = get_close_matches(unknown, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"


def _section_at(location: tuple[int | str, ...]) -> type[BaseModel]:
    section: type[BaseModel] = Study
    if location[:1] == ("models",):  # models.<name>.<kind as pydantic adds it>
        section, location = MODEL_KINDS[str(location[2])], location[3:]
    for part in location:
        annotation = section.model_fields[str(part)].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        section = annotation
    return section
