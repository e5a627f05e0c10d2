#!/usr/bin/env bash
# Versions: math-verify 0.9.0, latex2sympy2-extended 1.11.0, sympy 1.14.0; antlr4 runtimes below.
# Behaviour: `10\,000` (thin space between thousands) parses as the product 10*000 = 0, and `1e3`
#   as 1*e*3, with both ANTLR runtimes. What `50\%` is worth depends on the runtime installed.
# Output seen:
#   10\,000 -> 10*0, against gold 10000: False, against gold 0: True (both runtimes)
#   1e3 -> 1*E*3, against gold 1000: False (both runtimes)
#   50\% against gold 0.5: 50, False (antlr4 4.9.3); 50*(1/100), True (antlr4 4.13.2)
# Why it matters: these verdicts are the reward of RL on mathematics. Right answers get 0, the
#   answer 0 gets 1, and a 4-bit and a 16-bit run in two environments may be graded by two rules:
#   Hydra (by OmegaConf 2.3) needs runtime 4.9, so adding it to an environment changes the reward.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
cat > verdicts.py <<'PY'
import sys
from importlib.metadata import version

from math_verify import parse, verify

CASES = [  # gold, answer
    ("$10000$", r"$10\,000$"),
    ("$0$", r"$10\,000$"),
    ("$10000$", "$10,000$"),
    ("$1000$", "$1e3$"),
    ("$0.5$", r"$50\%$"),
]
verdicts = [verify(parse(gold), parse(answer)) for gold, answer in CASES]
print("antlr4 runtime", version("antlr4-python3-runtime"))
for (gold, answer), verdict in zip(CASES, verdicts):
    print(f"  gold {gold} answer {answer} -> {parse(answer)[0]}: {verdict}")
percent = sys.argv[1] == "percent"
sys.exit(0 if verdicts == [False, True, True, False, percent] else "behaviour changed")
PY
for run in "4.9.3 plain" "4.13.2 percent"; do
    read -r runtime rule <<< "$run"
    venv/bin/pip install --quiet math-verify==0.9.0 latex2sympy2-extended==1.11.0 \
        sympy==1.14.0 "antlr4-python3-runtime==$runtime"
    venv/bin/python verdicts.py "$rule"
done
