#!/usr/bin/env bash
# Versions: transformers 5.10.2, torch 2.13.0 (CPU), MLflow 3.17.2, scikit-learn 1.9.1.
# Behaviour: where scikit-learn is installed, importing a model class of transformers imports it too,
#   as one way to decode with an assistant model needs its ROC curve. MLflow requires scikit-learn,
#   but importing MLflow does not load it. So `pip install mlflow` makes every process slower that
#   imports transformers, also where nothing is tracked.
# Output seen (seconds on two slow cores beside other work, part of them SciPy's and pandas'):
#   without MLflow: 0 modules of sklearn, 7.6 s
#   with MLflow: 151 modules of sklearn, 15.5 s; by MLflow itself: 0
# Why it matters: trainers, Ray's workers and evaluations are many processes. An environment that
#   logs to MLflow pays this in each. MLflow installed without scikit-learn tracks as well.
set -euo pipefail
unset PYTHONPATH PYTHONDONTWRITEBYTECODE
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet transformers==5.10.2 torch==2.13.0
cat > count.py <<'PY'
import sys
import time

begun = time.perf_counter()
if sys.argv[1] == "mlflow":
    import mlflow
else:
    from transformers import Qwen3ForCausalLM
loaded = sum(name.split(".")[0] == "sklearn" for name in sys.modules)
print(loaded, f"{time.perf_counter() - begun:.1f}")
PY
count() { venv/bin/python count.py "$1"; }
count transformers >/dev/null  # compiles
read -r before before_s < <(count transformers)
venv/bin/pip install --quiet mlflow==3.17.2 scikit-learn==1.9.1
count transformers >/dev/null
read -r after after_s < <(count transformers)
read -r itself _ < <(count mlflow)
echo "without MLflow: $before modules of sklearn, $before_s s"
echo "with MLflow: $after modules of sklearn, $after_s s; by MLflow itself: $itself"
test "$before" = 0 -a "$after" -gt 100 -a "$itself" = 0
