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
