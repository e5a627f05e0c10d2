# What the rules share: the study, and digests that say when a result is out of date. Code is
# named by digest and not by file, because Snakemake looks at times and at a rule's own script,
# but never at what that script imports.
import os
import re
import sys
from pathlib import Path
from shlex import quote

from snakemake.settings.types import DeploymentMethod
from snakemake_interface_executor_plugins.settings import ExecMode

from analysis.figure_files import FORMATS, KINDS, figure_names
from analysis.judgeable import require_judgeable
from experiments.launch.digests import (
    code_digest,
    config_digest,
    lock_digest,
    not_executed,
)
from experiments.launch.preflight import check_devices, check_settings
from experiments.support.gpu_locks import shares_of_gpus, visible_gpus
from experiments.study.preview import preview
from experiments.runs.inputs import base_digest
from experiments.runs.inputs import data_digest
from experiments.launch.progress import expected_time
from experiments.runs.code import digest_code
from experiments.runs.provenance import digest_file, digest_json
from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES
from experiments.verl.verifier import verifier_of

CORES_PER_GPU = 16
# not one that Snakemake starts for a job, which reads all this again
IS_MAIN_PROCESS = workflow.exec_mode == ExecMode.DEFAULT
DEFAULT_STUDY = STUDIES / "default.yaml"


def as_literal(text):
    """A text in which Snakemake fills in nothing: its braces are doubled."""
    return text.replace("{", "{{").replace("}", "}}")


# rules call `python`: the one that runs Snakemake, whether its environment is active or not,
# with this repository's modules, wherever `--directory` is; tqdm's bars would clutter the logs.
# A prefix replaces Snakemake's own, without which a program fails unseen in front of `| tee`.
PREFIX = "set -euo pipefail; "
PREFIX += f"export PYTHONPATH={quote(str(workflow.basedir))} TQDM_DISABLE=1; "
if DeploymentMethod.CONDA not in workflow.deployment_settings.deployment_method:
    PREFIX += f"PATH={quote(str(Path(sys.executable).parent))}:$PATH; "
shell.prefix(as_literal(PREFIX))


def read_study_file():
    """The one study file: configurations are never merged, so that one file holds a whole study."""
    if workflow.config_settings.config:
        raise ValueError("--config: settings come from the study file; change it there")
    files = workflow.config_settings.configfiles
    if len(files) > 1:
        raise ValueError(f"--configfile: {len(files)} files given; name one study file")
    path = Path(files[0] if files else DEFAULT_STUDY)
    if "{" in str(path) or "}" in str(path):
        raise ValueError(
            f"--configfile: {path}: Snakemake reads braces as wildcards; rename it"
        )
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def read_study(path):
    """The study, which can be judged; prints what it would run."""
    study = load_study(path)
    if IS_MAIN_PROCESS:
        print(preview(study), expected_time(study), sep="\n", file=sys.stderr)
        require_judgeable(study)
    return study


def study_file(wildcards, output):
    """The study file, for a rule's command. It is no input, and its settings are digests: a study
    under another name is the same one. Snakemake compares no parameter that may use `output`.
    """
    return STUDY_FILE


def settings_of_base(wildcards):
    """What a base checkpoint depends on besides its code."""
    return base_digest(STUDY, wildcards.base)


def base_gpus(wildcards):
    """A checkpoint of the hub is only fetched, and nodes with GPUs often have no network."""
    is_made = STUDY.models[STUDY.bases[wildcards.base].model].kind != "hub"
    return int(STUDY.device == "cuda" and is_made)


def train_threads():
    """Cores of a run: the local trainer uses one; on GPUs, vLLM and Ray want some for each.

    Runs that share GPUs, as runs on a CPU, get few: else cores would let one begin at a time.
    """
    if STUDY.trainer == "local":
        return 1
    has_gpus = STUDY.device == "cuda" and not STUDY.gpu_memory_gib
    return CORES_PER_GPU * STUDY.gpus if has_gpus else 2


def of_job(file):
    """A file of every run of a job: of one run, or of all arms of a model and seed."""
    if not STUDY.shares_jobs:
        return [file.replace("RUN", "{run}")]
    return [file.replace("RUN", f"{{model}}_{arm}_seed{{seed}}") for arm in STUDY.arms]


def runs_of_job(wildcards):
    """The ids of those runs, in the same order."""
    return [name.format(**wildcards) for name in of_job("RUN")]


def training_digests(wildcards):
    """What runs depend on besides their code and base checkpoint."""
    runs = map(STUDY.find_run, runs_of_job(wildcards))
    return [config_digest(STUDY, run) for run in runs]


def training_code(wildcards):
    """The code that trains them."""
    runs = map(STUDY.find_run, runs_of_job(wildcards))
    return [code_digest(STUDY, run) for run in runs]


def bases_of(wildcards):
    """The base checkpoints that runs start from, named by their manifests."""
    runs = map(STUDY.find_run, runs_of_job(wildcards))
    bases = dict.fromkeys(STUDY.base_of(run) for run in runs)
    return [f"results/base/{base}/manifest.json" for base in bases]


def data_of_verl():
    """verl reads its problems from files; the local trainer draws its own."""
    return f"results/data/{STUDY.study}/data.json" if STUDY.trainer == "verl" else []


def code_of_data(wildcards):
    """Asked for where there is such data alone: to read all that it imports takes long."""
    return digest_code("experiments.verl.data")


def of_every_run(file):
    """A file of every run of the study."""
    return [f"results/{run.id}/{file}" for run in STUDY.runs]


def exit_unless_runnable():
    """Ends Snakemake with one line if the study cannot run, or not on this machine."""
    try:
        if workflow.local_exec:
            check_devices(STUDY, STUDY_FILE)
        check_settings(STUDY, STUDY.runs)
    except ValueError as error:
        sys.exit(f"error: {error}")


try:
    STUDY_FILE = read_study_file()
    STUDY = read_study(STUDY_FILE)
except ValueError as error:
    sys.exit(f"error: {error}")

# Snakemake only counts the GPUs: which ones a job gets is up to experiments.support.gpu_locks
if (
    STUDY.device == "cuda"
    and IS_MAIN_PROCESS
    and workflow.local_exec
    and "gpu" not in workflow.global_resources
):
    shared = STUDY.gpu_memory_gib
    num_gpus = shares_of_gpus(shared) if shared else len(visible_gpus())
    workflow.register_resource("gpu", max(1, num_gpus))

# what is required of the arms, and which claim decides
CLAIMS = digest_json([STUDY.primary, STUDY.claims.model_dump(mode="json")])
UNUSED = not_executed(STUDY)
LABELS = "analysis/metrics.yaml"
TEMPLATE = ("analysis/report/template.html", "analysis/report/style.css")
STUDY_DIR = f"results/studies/{STUDY.study}"
PROTOCOL = KINDS[STUDY.judged_by].protocol
FIGURES = {
    name: f"{STUDY_DIR}/figures/{name}.{FORMATS[0]}" for name in figure_names(STUDY)
}
