#!/usr/bin/env bash
# Writes base.txt and dev.txt: what pip resolves today for pyproject.toml in an empty environment.
# Left out: torch's +cpu (only some indexes have it) and what torch itself pins for CUDA.
# torch is chosen by hand: the newest version that the code has been tested with.
set -euo pipefail
torch="torch==2.13.0"
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh" build' EXIT
"${PYTHON:-python3.11}" -m venv "$fresh"

freeze() {
    "$fresh/bin/pip" freeze --exclude nvfp4-qat-rl |
        sed -e 's/+cpu$//' -e '/^nvidia-/d' -e '/^cuda-/d' -e '/^triton==/d' | LC_ALL=C sort
}

"$fresh/bin/pip" install --quiet "$torch" ".[harness]"
freeze >"$fresh/base"
"$fresh/bin/pip" install --quiet "$torch" ".[harness,dev]"
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
