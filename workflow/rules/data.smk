# The problems of a study in verl's format; the local trainer draws its own.
STUDY_DATA = f"results/data/{STUDY.study}"


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
        code=digest_code("experiments.verl.data"),
    message:
        "Making the data of study {STUDY.study}"
    shell:
        "python -m experiments.verl.data --study {params.study:q} --out {params.out:q} 2>&1 | tee {log:q}"
