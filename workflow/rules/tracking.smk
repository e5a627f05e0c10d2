# MLflow follows each run live, from within the run; what is known only later is added here. The
# store is no rule's input: it is a view of the files, and losing it must not train anything again.
rule publish:
    input:
        evals=of_every_run("eval.json"),
        claims=f"{STUDY_DIR}/claims.json",
        figures=FIGURES.values(),
    output:
        runs=f"{STUDY_DIR}/mlflow.json",
    log:
        f"logs/publish/{STUDY.study}.log",
    localrule: True
    conda:
        "../../environment.yml"
    params:
        study=study_file,
    message:
        "Adding evaluations, claims and figures to MLflow"
    shell:
        "python -m experiments.tracking.publish publish --study {params.study:q} --out {output.runs:q}"
        " 2>&1 | tee {log:q}"
