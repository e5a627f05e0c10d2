#!/usr/bin/env bash
# Versions: hydra-core 1.3.2, omegaconf 2.3.0.
# Behaviour: `+group@_global=choice` (the package is spelled `_global_`) composes without an error
#   or a warning. The choice lands below a new key `_global`, and nothing that it sets is set.
# Output seen:
#   +precision@_global_=nvfp4
#     {'weight_bits': 4}
#   +precision@_global=nvfp4
#     {'weight_bits': 16, '_global': {'weight_bits': 4}}
# Why it matters: this is how a 4-bit recipe is laid over a trainer's configuration (verl's, say).
#   With one underscore missing the run trains at 16 bits, and its log looks like any other.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet hydra-core==1.3.2 omegaconf==2.3.0
mkdir -p conf/precision
echo 'weight_bits: 16' > conf/config.yaml
echo 'weight_bits: 4' > conf/precision/nvfp4.yaml
cat > app.py <<'PY'
import hydra


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config):
    print(config)


main()
PY
for package in _global_ _global; do
    echo "+precision@$package=nvfp4"
    venv/bin/python app.py "+precision@$package=nvfp4" 2>&1 | tee "$package.txt" | sed 's/^/  /'
done
[ "$(cat _global_.txt)" = "{'weight_bits': 4}" ]
[ "$(cat _global.txt)" = "{'weight_bits': 16, '_global': {'weight_bits': 4}}" ]
