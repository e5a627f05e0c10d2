#!/usr/bin/env bash
# Versions: snakemake 9.27.1.
# Behaviour: a params function that takes `output` (or input, threads, resources) is left out of
#   the rerun trigger "params", whatever it returns. Two rules hold the same setting; after it
#   changes, only the rule whose function takes wildcards alone runs again.
# Output seen:
#   config bits=16: wildcards.txt has 16, output.txt has 16
#   config bits=4: wildcards.txt has 4, output.txt has 16
# Why it matters: a study of 4-bit training keeps format, seed and learning rate in params. One more
#   argument in the lambda, and results made with the old setting stand beside new ones as current.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet snakemake==9.27.1
cat > Snakefile <<'SMK'
rule all:
    input: "wildcards.txt", "output.txt"

rule of_wildcards:
    output: "wildcards.txt"
    params: bits=lambda wildcards: config["bits"]
    shell: "echo {params.bits} > {output}"

rule of_output:
    output: "output.txt"
    params: bits=lambda wildcards, output: config["bits"]
    shell: "echo {params.bits} > {output}"
SMK
for bits in 16 4; do
    venv/bin/snakemake --cores 1 --quiet all --config bits=$bits > log 2>&1 || { cat log; exit 1; }
    echo "config bits=$bits: wildcards.txt has $(cat wildcards.txt), output.txt has $(cat output.txt)"
done
[ "$(cat wildcards.txt output.txt | paste -sd' ')" = "4 16" ]
