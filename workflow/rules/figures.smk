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
