# Base checkpoints and the runs that start from them. Checkpoints of a run lie undeclared beside
# its metrics: Snakemake would delete them when a run fails, and with them what it resumes from.
rule base:
    input:
        study=ancient(STUDY_FILE),
    output:
        weights="results/base/{model}/model.safetensors",
        manifest="results/base/{model}/manifest.json",
    log:
        "logs/base/{model}.log",
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        gpu=int(STUDY.device == "cuda"),
    params:
        out=subpath(output.weights, parent=True),
        settings=base_digest,
        code=digest_code("experiments.base"),
    message:
        "Making the base checkpoint of {wildcards.model}"
    shell:
        "python -m experiments.base --study {input.study} --model {wildcards.model}"
        " --out {params.out} 2>&1 | tee {log}"


rule train:
    input:
        study=ancient(STUDY_FILE),
        base=base_of,
    output:
        metrics="results/{run}/metrics.jsonl",
        manifest="results/{run}/manifest.json",
    log:
        "logs/train/{run}.log",
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        gpu=int(STUDY.device == "cuda"),
    params:
        settings=training_digest,
        code=digest_code(*TRAINING_CODE),
    message:
        "Training {wildcards.run}"
    shell:
        "python -m experiments.launch --study {input.study} --run {wildcards.run} --log {log}"
