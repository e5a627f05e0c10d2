# The rules of a study, in the order in which its results come to be.
STUDY_DATA = f"results/data/{STUDY.study}"


# The problems of a study in verl's format; the local trainer draws its own.
rule data:
    output:
        train=f"{STUDY_DATA}/train.parquet",
        test=f"{STUDY_DATA}/test.parquet",
        description=f"{STUDY_DATA}/data.json",
    log:
        f"logs/data/{STUDY.study}.log",
    localrule: True
    conda:
        "../../environment.yml"
    params:
        study=study_file,
        out=subpath(output.train, parent=True),
        settings=data_digest(STUDY.task),
        code=code_of_data,
    message:
        "Making the data of study {STUDY.study}"
    shell:
        "python -m experiments.verl.data --study {params.study:q} --out {params.out:q} 2>&1 | tee {log:q}"


# Base checkpoints and the runs that start from them. Checkpoints of a run are undeclared, next
# to its metrics: Snakemake would delete them when a run fails, and with them what it resumes from.
rule base:
    output:
        # a large model's weights are in many files: only what every base has is named
        config="results/base/{base}/config.json",
        manifest="results/base/{base}/manifest.json",
    log:
        "logs/base/{base}.log",
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        gpu=base_gpus,
    params:
        study=study_file,
        out=subpath(output.config, parent=True),
        settings=settings_of_base,
        code=digest_code("experiments.base.make", without=UNUSED),
    message:
        "Making the base checkpoint {wildcards.base}"
    shell:
        "python -m experiments.base make --study {params.study:q} --model {wildcards.base:q}"
        " --out {params.out:q} 2>&1 | tee {log:q}"


rule train:
    input:
        base=bases_of,
        data=data_of_verl(),
    output:
        metrics=of_job("results/RUN/metrics.jsonl"),
        manifest=of_job("results/RUN/manifest.json"),
    log:
        of_job("logs/train/RUN.log"),
    conda:
        "../../environment.yml"
    threads: train_threads()
    resources:
        gpu=STUDY.gpus if STUDY.device == "cuda" else 0,
    params:
        study=study_file,
        runs=runs_of_job,
        settings=training_digests,
        code=training_code,
        lock=lock_digest(STUDY),
    message:
        "Training {params.runs}"
    shell:
        "python -m experiments.launch.run --study {params.study:q} --run {params.runs:q} --log {log:q}"


# Offline accuracy of the base and the saved checkpoints, in one precision each for all arms.
rule evaluate:
    input:
        manifest=of_job("results/RUN/manifest.json"),
        data=[f"{STUDY_DATA}/test.parquet"] if STUDY.trainer == "verl" else [],
    output:
        accuracy=of_job("results/RUN/eval.json"),
    log:
        of_job("logs/evaluate/RUN.log"),
    conda:
        "../../environment.yml"
    threads: 1 if STUDY.device == "cpu" or STUDY.gpu_memory_gib else CORES_PER_GPU
    resources:
        gpu=int(STUDY.device == "cuda"),
    params:
        study=study_file,
        runs=runs_of_job,
        settings=digest_json(STUDY.evaluation.model_dump(mode="json")),
        verifier=digest_json(verifier_of(STUDY.task.name)),
        code=digest_code("experiments.evaluate.run", without=UNUSED),
    message:
        "Evaluating {params.runs}"
    shell:
        "python -m experiments.evaluate.run --study {params.study:q} --run {params.runs:q}"
        " 2>&1 | tee {log:q}"


# The study's claims, judged. The table is printed when the workflow has ended.
rule compare:
    input:
        manifests=of_every_run("manifest.json"),
        metrics=of_every_run("metrics.jsonl"),
        evals=of_every_run("eval.json"),
    output:
        data=f"{STUDY_DIR}/claims.json",
        table=f"{STUDY_DIR}/claims.md",
    log:
        f"logs/compare/{STUDY.study}.log",
    localrule: True
    conda:
        "../../environment.yml"
    params:
        study=study_file,
        out=subpath(output.table, parent=True),
        claims=CLAIMS,
        code=digest_code("analysis.claims", without=UNUSED),
    message:
        "Judging the claims of study {STUDY.study}"
    shell:
        "python -m analysis.claims --study {params.study:q} --results results --out {params.out:q}"
        " > {log:q} 2>&1"


# All figures of a study in one process: each takes a fraction of the time of loading the results.
rule figures:
    input:
        manifests=of_every_run("manifest.json"),
        metrics=of_every_run("metrics.jsonl"),
        evals=of_every_run("eval.json"),
    output:
        **FIGURES,
    log:
        f"logs/figures/{STUDY.study}.log",
    localrule: True
    conda:
        "../../environment.yml"
    params:
        study=study_file,
        out=subpath(output[0], parent=True),
        code=digest_code("analysis.figures.__main__", without=UNUSED),
        claims=CLAIMS,
        labels=digest_file(ROOT / LABELS),
    message:
        "Drawing the figures of study {STUDY.study}"
    shell:
        "python -m analysis.figures --study {params.study:q} --results results"
        " --out {params.out:q} > {log:q} 2>&1"


# One self-contained page: claims, figures, which it draws itself, provenance and protocol.
rule report:
    input:
        manifests=of_every_run("manifest.json"),
        metrics=of_every_run("metrics.jsonl"),
        evals=of_every_run("eval.json"),
        claims=f"{STUDY_DIR}/claims.md",
    output:
        page=f"{STUDY_DIR}/report.html",
    log:
        f"logs/report/{STUDY.study}.log",
    localrule: True
    conda:
        "../../environment.yml"
    params:
        study=study_file,
        code=digest_code("analysis.report.__main__", without=UNUSED),
        shown=[digest_file(ROOT / name) for name in (*TEMPLATE, PROTOCOL, LABELS)],
    message:
        "Writing the report of study {STUDY.study}"
    shell:
        "python -m analysis.report --study {params.study:q} --results results --out {output.page:q}"
        " > {log:q} 2>&1"


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
        "python -m experiments.tracking publish --study {params.study:q} --out {output.runs:q}"
        " 2>&1 | tee {log:q}"
