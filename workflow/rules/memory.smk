# Weight memory, predicted from shapes and measured, of every run.
rule memory:
    input:
        study=ancient(STUDY_FILE),
        manifests=of_every_run("manifest.json"),
    output:
        memory=f"{STUDY_DIR}/memory.json",
    log:
        f"logs/memory/{STUDY.study}.log",
    localrule: True
    conda:
        "../../environment.yml"
    params:
        code=digest_code("experiments.weight_memory"),
    message:
        "Gathering predicted and measured weight memory"
    shell:
        "python -m experiments.weight_memory --study {input.study} --out {output.memory}"
        " > {log} 2>&1"
