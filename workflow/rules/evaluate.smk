# Offline accuracy of the base and the saved checkpoints, in one precision each for all arms.
rule evaluate:
    input:
        manifest="results/{run}/manifest.json",
        data=[f"{STUDY_DATA}/test.parquet"] if STUDY.trainer == "verl" else [],
    output:
        accuracy="results/{run}/eval.json",
    log:
        "logs/evaluate/{run}.log",
    conda:
        "../../environment.yml"
    threads: 1 if STUDY.device == "cpu" or STUDY.gpu_memory_gib else CORES_PER_GPU
    resources:
        gpu=int(STUDY.device == "cuda"),
    params:
        study=study_file,
        settings=digest_json(STUDY.evaluation.model_dump(mode="json")),
        verifier=digest_json(verifier_of(STUDY.task.name)),
        code=digest_code("experiments.evaluate.run", without=UNUSED),
    message:
        "Evaluating {wildcards.run}"
    shell:
        "python -m experiments.evaluate.run --study {params.study:q} --run {wildcards.run:q}"
        " 2>&1 | tee {log:q}"
