#!/usr/bin/env bash
# Writes the locks and ../environment.yml: what pip resolves today for pyproject.toml in an empty
# environment, and, for all locks but torch's, the SHA-256 sums of every file that PyPI has of a
# version. engines.txt and smollm2.txt keep their pins, which are chosen by hand.
# torch has no sums: which of its builds (CPU or CUDA) is installed, the machine's index decides.
# What torch itself pins for CUDA is left to it.
# torch and transformers are chosen by hand: the versions that the code has been tested with.
set -euo pipefail
chosen=(torch==2.13.0 transformers==5.10.2)
# MLflow names scikit-learn for models that are not tracked here; where it is installed, transformers
# imports it, for seconds in each process. The others are needed by it or by skops alone. All are
# pinned for conda, whose pip installs them anyway.
unused='joblib|narwhals|prettytable|scikit-learn|skops|threadpoolctl|wcwidth'
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh" build' EXIT
"${PYTHON:-python3.11}" -m venv "$fresh"

freeze() {
    "$fresh/bin/pip" freeze --exclude nvfp4-qat-rl |
        sed -e 's/+cpu$//' -e '/^nvidia-/d' -e '/^cuda-/d' -e '/^triton==/d' | LC_ALL=C sort
}

without_unused() {
    grep -vE "^($unused)=="
}

# pins on standard input; asks PyPI itself, whatever index pip is told to use
with_sums() {
    "$fresh/bin/uv" pip compile - --no-config --default-index https://pypi.org/simple --no-deps \
        --generate-hashes --no-header --no-annotate --quiet
}

"$fresh/bin/pip" install --quiet "${chosen[@]}" ".[harness]"
freeze >"$fresh/conda"
without_unused <"$fresh/conda" >"$fresh/base"
"$fresh/bin/pip" install --quiet "${chosen[@]}" ".[harness,dev]"
freeze | without_unused >"$fresh/dev"
"$fresh/bin/pip" install --quiet uv
{
    echo "# What \`make run\` needs besides torch, exact. Made by \`make lock\`; do not edit."
    grep -v '^torch==' "$fresh/base" | with_sums
} >requirements/base.txt
{
    echo "# Its build is the index's choice, hence no sums. Made by \`make lock\`; do not edit."
    grep '^torch==' "$fresh/base"
} >requirements/torch.txt
{
    echo "# What \`make test\` needs besides. Made by \`make lock\` from pyproject.toml; do not edit."
    echo "-r base.txt"
    LC_ALL=C comm -13 "$fresh/base" "$fresh/dev" | with_sums
} >requirements/dev.txt
for by_hand in requirements/engines.txt requirements/smollm2.txt; do
    {
        grep '^#' "$by_hand"
        grep -o '^[^ #-][^ ]*==[^ ]*' "$by_hand" | with_sums
    } >"$fresh/lock"
    cp "$fresh/lock" "$by_hand"
done
{
    echo "# The environment of base.txt with conda, and what MLflow names besides:"
    echo "# \`conda env create -f environment.yml\`, then \`snakemake\` in this folder."
    echo "# Made by \`make lock\`; do not edit."
    printf '%s\n' "name: nvfp4-qat-rl" "channels:" "  - conda-forge" "dependencies:"
    printf '%s\n' "  - python=3.11" "  - pip" "  - pip:"
    sed 's/^/      - /' "$fresh/conda"
} >environment.yml
