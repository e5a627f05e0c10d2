#!/usr/bin/env bash
# Versions: verl 0.9.1, torch 2.13.0 (CPU).
# Behaviour: verl's file logger (trainer.logger: [file]) opens its JSON lines for writing, not for
#   appending. The process that resumes a run empties the file that the first one wrote.
# Output seen:
#   first process wrote steps 1, 2; file has steps [1, 2]
#   second process wrote step 3; file has steps [3]
# Why it matters: runs resume by themselves (trainer.resume_mode is auto). The curve of rewards and
#   of mismatch up to the crash, which is what shows why it crashed, is gone. Copy the file first.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet verl==0.9.1 torch==2.13.0 transformers==5.10.2
cat >steps.py <<'PY'
import sys

from verl.utils.tracking import Tracking

tracking = Tracking("project", "run", default_backend=["file"], config={})
for step in sys.argv[1:]:
    tracking.log({"critic/score/mean": 0.5}, step=int(step))
PY
steps() { sed 's/.*"step":\([0-9]*\).*/\1/' project/run.jsonl | paste -sd, | sed 's/,/, /g; s/.*/[&]/'; }
venv/bin/python steps.py 1 2 >log 2>&1 || { cat log; exit 1; }
first=$(steps)
venv/bin/python steps.py 3 >log 2>&1 || { cat log; exit 1; }
echo "first process wrote steps 1, 2; file has steps $first"
echo "second process wrote step 3; file has steps $(steps)"
[ "$first $(steps)" = "[1, 2] [3]" ]
