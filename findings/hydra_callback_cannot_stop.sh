#!/usr/bin/env bash
# Versions: hydra-core 1.3.2, omegaconf 2.3.0.
# Behaviour: an exception raised in a hydra Callback (on_run_start, on_job_start) becomes a
#   UserWarning. The job's body runs all the same, and the exit status is 0.
# Output seen:
#   UserWarning: Callback Refusal.on_run_start raised ValueError: this run must not start
#   UserWarning: Callback Refusal.on_job_start raised ValueError: this job must not start
#   the body ran
#   exit status 0
# Why it matters: a callback looks like the place to refuse a run before it takes GPUs (a format
#   that the card lacks, say). It cannot: the refused run trains. Refuse in the body instead.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet hydra-core==1.3.2 omegaconf==2.3.0
cat > refusal.py <<'PY'
from hydra.experimental.callback import Callback


class Refusal(Callback):
    def on_run_start(self, config, **_):
        raise ValueError("this run must not start")

    def on_job_start(self, config, **_):
        raise ValueError("this job must not start")
PY
cat > app.py <<'PY'
import hydra


@hydra.main(version_base=None)
def main(config):
    print("the body ran")


main()
PY
status=0
venv/bin/python app.py +hydra.callbacks.refusal._target_=refusal.Refusal > log 2>&1 || status=$?
echo "exit status $status" >> log
sed 's/.*UserWarning/UserWarning/; /warnings.warn/d' log
for line in "on_run_start raised ValueError: this run must not start" \
    "on_job_start raised ValueError: this job must not start" "the body ran" "exit status 0"; do
    grep -q "$line" log
done
