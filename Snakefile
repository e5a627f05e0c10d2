# A study from base checkpoints to claims and figures: `snakemake --cores all` runs
# experiments/studies/default.yaml, with `--configfile FILE` another study; `-n` plans one and
# predicts its weight memory.
from snakemake.utils import min_version

min_version("9.12")


include: "workflow/rules/common.smk"
include: "workflow/rules/study.smk"


wildcard_constraints:
    base="|".join(map(re.escape, STUDY.bases)),
    run="|".join(re.escape(run.id) for run in STUDY.runs),
    model="|".join(map(re.escape, STUDY.models)),
    seed=r"\d+",


rule all:
    default_target: True
    input:
        claims=f"{STUDY_DIR}/claims.md",
        figures=FIGURES.values(),
        report=f"{STUDY_DIR}/report.html",
        published=f"{STUDY_DIR}/mlflow.json",
    localrule: True
    message:
        "Study {STUDY.study} is complete: see {STUDY_DIR}, or `make ui`"


onstart:
    exit_unless_runnable()


onsuccess:
    # make prints the table itself, as no hook is called where nothing had to be done; there is none
    # where only part of the study was asked for
    if "MAKELEVEL" not in os.environ and Path(f"{STUDY_DIR}/claims.json").exists():
        shell("python -m analysis.claims_table {STUDY_DIR:q}/claims.json")
