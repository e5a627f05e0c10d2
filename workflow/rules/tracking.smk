# MLflow's store: made by one process before any run, filled live by the runs, completed at the end.
rule init_tracking:
    output:
        store="mlflow.db",
    log:
        "logs/init_tracking.log",
    localrule: True
    conda:
        "../../environment.yml"
    message:
        "Making the MLflow store (with the runs that are there already)"
    shell:
        "(mlflow db upgrade sqlite:///{output.store}"
        " && python -m experiments.tracking rebuild) > {log} 2>&1"


rule publish:
    input:
        study=ancient(STUDY_FILE),
        evals=of_every_run("eval.json"),
        claims=f"{STUDY_DIR}/claims.json",
        memory=f"{STUDY_DIR}/memory.json",
        figures=FIGURES.values(),
        store=ancient("mlflow.db"),
    output:
        runs=f"{STUDY_DIR}/mlflow.json",
    log:
        f"logs/publish/{STUDY.study}.log",
    localrule: True
    conda:
        "../../environment.yml"
    message:
        "Adding evaluations, claims and figures to MLflow"
    shell:
        "python -m experiments.tracking publish --study {input.study} --out {output.runs}"
        " 2>&1 | tee {log}"
