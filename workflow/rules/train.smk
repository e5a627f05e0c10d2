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
        "python -m experiments.base.make --study {params.study:q} --model {wildcards.base:q}"
        " --out {params.out:q} 2>&1 | tee {log:q}"


rule train:
    input:
        base=base_of,
        data=data_of_verl(),
    output:
        metrics="results/{run}/metrics.jsonl",
        manifest="results/{run}/manifest.json",
    log:
        "logs/train/{run}.log",
    conda:
        "../../environment.yml"
    threads: train_threads()
    resources:
        gpu=STUDY.gpus if STUDY.device == "cuda" else 0,
    params:
        study=study_file,
        settings=training_digest,
        code=training_code,
        lock=lock_digest(STUDY),
    message:
        "Training {wildcards.run}"
    shell:
        "python -m experiments.launch.run --study {params.study:q} --run {wildcards.run:q} --log {log:q}"
