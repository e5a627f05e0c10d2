#!/usr/bin/env bash
# Writes base.txt, dev.txt and ../environment.yml: what pip resolves today for pyproject.toml in
# an empty environment.
# Left out: torch's +cpu (only some indexes have it) and what torch itself pins for CUDA.
# torch and transformers are chosen by hand: the versions that the code has been tested with.
set -euo pipefail
chosen=(torch==2.13.0 transformers==5.10.2)
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh" build' EXIT
"${PYTHON:-python3.11}" -m venv "$fresh"

freeze() {
    "$fresh/bin/pip" freeze --exclude nvfp4-qat-rl |
        sed -e 's/+cpu$//' -e '/^nvidia-/d' -e '/^cuda-/d' -e '/^triton==/d' | LC_ALL=C sort
}

"$fresh/bin/pip" install --quiet "${chosen[@]}" ".[harness]"
freeze >"$fresh/base"
"$fresh/bin/pip" install --quiet "${chosen[@]}" ".[harness,dev]"
freeze >"$fresh/dev"
{
    echo "# What \`make run\` needs, exact. Made by \`make lock\` from pyproject.toml; do not edit."
    cat "$fresh/base"
} >requirements/base.txt
{
    echo "# What \`make test\` needs besides. Made by \`make lock\` from pyproject.toml; do not edit."
    echo "-r base.txt"
    LC_ALL=C comm -13 "$fresh/base" "$fresh/dev"
} >requirements/dev.txt
{
    echo "# The environment of base.txt with conda: \`conda env create -f environment.yml\`, then"
    echo "# \`snakemake\` in this folder. Made by \`make lock\`; do not edit."
    printf '%s\n' "name: nvfp4-qat-rl" "channels:" "  - conda-forge" "dependencies:"
    printf '%s\n' "  - python=3.11" "  - pip" "  - pip:"
    sed 's/^/      - /' "$fresh/base"
} >environment.yml
