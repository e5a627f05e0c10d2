"""Where the models of a study come from, one section of the study file a kind."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from experiments.rl.config import PretrainConfig, Settings

# "_" separates the parts of a run id, so a model's name must not hold one.
MODEL_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9.-]*$"
ModelName = Annotated[str, Field(pattern=MODEL_NAME_PATTERN)]


class AnyModel(Settings):
    """What every model of a study may say."""

    recipe: str | None = Field(None, description="trainer verl: folder of experiments/recipes")

    def training_config(self) -> dict[str, Any]:
        """What decides the base checkpoint, ready for JSON."""
        return self.model_dump(mode="json", exclude={"recipe"})


class ScratchModel(AnyModel):
    """A model made from random weights by a rule of the pipeline."""

    kind: Literal["scratch"]
    config: Path = Field(description="Hugging Face config.json of the architecture")
    pretrain: PretrainConfig | None = Field(
        None, description="supervised training on the task; without it the weights stay random"
    )


class GgufModel(AnyModel):
    """A pretrained model inside a GGUF file that a Python package ships."""

    kind: Literal["gguf"]
    package: str = Field(description="importable name of the package that holds the file")
    file: str = Field(description="path of the GGUF file inside the package")
    pretrain: PretrainConfig | None = Field(
        None, description="supervised training on the task's answers, for weak chat models"
    )


class HubModel(AnyModel):
    """A published checkpoint, named by its repository; its shapes come from a local config."""

    kind: Literal["hub"]
    config: Path = Field(description="Hugging Face config.json of the architecture")
    repo: str = Field(description="owner/name of the checkpoint on the Hugging Face Hub")
    revision: str = Field("main", description="branch, tag or commit there")
    path: Path | None = Field(
        None, description="folder that holds the checkpoint, for a machine without a network"
    )


Model = Annotated[ScratchModel | GgufModel | HubModel, Field(discriminator="kind")]
MODEL_KINDS: dict[str, type[Settings]] = {
    "scratch": ScratchModel,
    "gguf": GgufModel,
    "hub": HubModel,
}
