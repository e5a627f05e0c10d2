#!/usr/bin/env bash
# Versions: hydra-core 1.3.2, omegaconf 2.3.0, PyYAML 6.0.3.
# Behaviour: an unquoted `off` (also no, on, yes) is a boolean in a YAML file and a string on the
#   command line. So the same line means False in a file and "off", which is true, as an override;
#   and a group's choice `off` works as an override but fails in a defaults list, with an error
#   that names neither file nor key.
# Output seen:
#   in_file: {'quantize': False}
#   empty +quantize=off: {'quantize': 'off'}
#   empty +kv_cache=off: {'kv_cache': {'bits': 16}}
#   quoted: {'kv_cache': {'bits': 16}}
#   bare: ValueError: Unsupported item value in defaults : bool. Supported: string or list
# Why it matters: `off` is the natural name for the 16-bit side of an A/B run. As an override, code
#   that asks `if config.quantize` quantizes the side that should not be.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet hydra-core==1.3.2 omegaconf==2.3.0 PyYAML==6.0.3
mkdir -p conf/kv_cache
echo 'quantize: off' > conf/in_file.yaml
echo '{}' > conf/empty.yaml
echo 'bits: 16' > conf/kv_cache/off.yaml
printf 'defaults:\n  - kv_cache: %s\n' off > conf/bare.yaml
printf 'defaults:\n  - kv_cache: %s\n' '"off"' > conf/quoted.yaml
cat > app.py <<'PY'
from hydra import compose, initialize

CASES = [
    ("in_file", [], "{'quantize': False}"),
    ("empty", ["+quantize=off"], "{'quantize': 'off'}"),
    ("empty", ["+kv_cache=off"], "{'kv_cache': {'bits': 16}}"),
    ("quoted", [], "{'kv_cache': {'bits': 16}}"),
    ("bare", [], "ValueError: Unsupported item value in defaults : bool."),
]
changed = False
with initialize(version_base=None, config_path="conf"):
    for name, overrides, told in CASES:
        try:
            seen = str(compose(name, overrides))
        except ValueError as error:
            seen = f"ValueError: {error}"
        print(f"{' '.join([name, *overrides])}: {seen}")
        changed = changed or not seen.startswith(told)
raise SystemExit("behaviour changed" if changed else 0)
PY
venv/bin/python app.py
