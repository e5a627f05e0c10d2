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
