#!/usr/bin/env bash
# vLLM 0.33 on a Hopper GPU: is it right, which kernel has which k3 KL, how fast. From the repository's
# root, all parts in at most 20 minutes or, in three parts of at most 10 minutes:
#   gpu_plan.sh start right    unpack if needed, versions and libraries (1.5 min); then all at once on
#                              one GPU (5 to 8 min): table of versions (GPU tests of engine and syncs),
#                              100 syncs against a fresh load, k3 KL by kernel, batch-invariant mode
#   gpu_plan.sh serve          alone: Qwen3-8B, Marlin and BF16, two starts each (7 to 8 min)
#   gpu_plan.sh humming more   vLLM's Humming beside them (--resume, 3.5 min); syncs with torch.compile
# vLLM's default on Hopper is its Humming: `vllm-humming` by name. Logs in /tmp/vllm33/o, results in /tmp/vllm33/r,
# outcomes in /tmp/vllm33/r/steps.txt, all copied to $OUT if that is set. A failure ends nothing.
# SITE=/tmp/vllm33/site33 PARTS=/tmp/vllm33/parts33 PYTHON=python3 O=/tmp/vllm33/o R=/tmp/vllm33/r; DEVICE=cpu rehearses.
set -uo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
SITE=${SITE:-/tmp/vllm33/site33} PARTS=${PARTS:-/tmp/vllm33/parts33} PYTHON=${PYTHON:-python3} DEVICE=${DEVICE:-cuda}
O=${O:-/tmp/vllm33/o} R=${R:-/tmp/vllm33/r}
mkdir -p "$O" "$R"
export PYTHONPATH="$PWD:$SITE" PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1 VLLM_USE_FLASHINFER_SAMPLER=0
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 PYTHONDONTWRITEBYTECODE=1
export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-/tmp/vllm33/nv_cache} CUDA_CACHE_MAXSIZE=4294967296  # Marlin is PTX there
export VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-/tmp/vllm33/vllm_cache}

step() {  # NAME SECONDS COMMAND...: its log in $O, its outcome in $R/steps.txt
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  timeout -k 10 "$limit" "$@" >"$O/$name.log" 2>&1
  echo "$name rc=$? $((SECONDS - begin))s" | tee -a "$R/steps.txt"
}
bench() {  # NAME SECONDS COMMAND ARGUMENTS...
  local name=$1 limit=$2 command=$3
  shift 3
  step "$name" "$limit" "$PYTHON" -m experiments.benchmarks "$command" "$R/$name.json" "$@" --device "$DEVICE"
}

start() {
  [ -d "$SITE/vllm" ] || step unpack 120 bash "$HERE/unpack33.sh" "$PARTS" "$SITE"
  cat "$O/unpack.log" 2>/dev/null
  cat >"$O/versions.py" <<'PY'
import importlib.metadata as m
import torch, transformers, triton, triton.language as tl, vllm
print(vllm.__version__, torch.__version__, transformers.__version__, "humming", m.version("humming-kernels"))
print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
print("cuBLAS", (x @ x).float().norm().item())
print("SDPA", torch.nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3).float().norm().item())
@triton.jit
def one(p):
    tl.store(p + tl.program_id(0), 1.0)
y = torch.zeros(8, device="cuda")
one[(8,)](y)
print("Triton", y.sum().item())
from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported
print("FA3", is_fa_version_supported(3))
from qat_core.rollout.vllm.compat import require_supported
require_supported(vllm.__version__, on_cpu=False)
print("supported")
PY
  step versions 100 "$PYTHON" "$O/versions.py"
  tail -8 "$O/versions.log"
}

invariant() {  # NAME MODEL RECIPE: whether an engine starts in batch-invariant mode
  cat >"$O/$1.py" <<PY
import tempfile
from pathlib import Path
from experiments.base.random_model import write_architecture
from experiments.benchmarks.architectures import ARCHITECTURES, engine_settings
from qat_core.checkpoint.architecture import meta_model
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.vllm.engine import VllmEngine
path = Path(tempfile.mkdtemp()) / "model"
write_architecture(ARCHITECTURES["$2"] | {"num_hidden_layers": 2}, path)
planned = plan(meta_model(path), Recipe.$3())
settings = engine_settings("$DEVICE", 4) | {"attention_config": {"backend": "FLASH_ATTN"}}
engine = VllmEngine(path, planned, load_format="dummy", **settings)
print("STARTS: $1:", len(engine.served), "weights in NVFP4")
PY
  VLLM_BATCH_INVARIANT=1 step "$1" 150 "$PYTHON" "$O/$1.py"
}

right() {
  export OMP_NUM_THREADS=2
  local limit=${RIGHT_S:-490}
  if [ "$DEVICE" = cuda ]; then
    step tests "$limit" "$PYTHON" -m tests.integration.vllm_versions &
    for model in dense moe; do
      bench parity_humming_$model "$limit" parity --models $model --kernels vllm-humming &
      bench bitwise_humming_$model "$limit" bitwise --models $model --kernels vllm-humming &
    done
    (
      invariant invariant_dense dense full
      invariant invariant_moe_marlin moe ffn
      export QAT_CORE_EXPERTS_KERNEL=vllm-humming
      invariant invariant_moe_humming moe ffn
    ) &
  fi
  for model in dense moe; do
    bench parity_marlin_$model "$limit" parity --models $model --kernels nvfp4 &
    bench bitwise_marlin_$model "$limit" bitwise --models $model --kernels nvfp4 &
  done
  wait
  cp experiments/records/benchmarks/vllm_versions.json "$R/"
  tail -25 "$O/tests.log" 2>/dev/null
  grep -hE "^(STARTS|[A-Za-z]*Error:)" "$O"/invariant_*.log 2>/dev/null
  unset OMP_NUM_THREADS
}

serving() {  # SECONDS ENGINES...: the GPU alone; a row is written after an engine's last start
  local limit=$1 resume=()
  shift
  [ -f "$R/serving.json" ] && resume=(--resume)
  bench serving "$limit" serving "$@" --compile --starts 2 "${resume[@]}"
}
serve() { serving "${SERVE_S:-540}" "$MODEL:nvfp4" "$MODEL:bf16"; }
humming() { serving "${HUMMING_S:-270}" "$MODEL:nvfp4" "$MODEL:bf16" "$MODEL:vllm-humming"; }
more() { bench bitwise_compiled 300 bitwise --models dense --kernels nvfp4 --compile; }
MODEL=${MODEL:-qwen3-8b}

begin=$SECONDS
[ $# -gt 0 ] || set -- start right serve humming more
for part in "$@"; do
  if [ "$part" = more ] && [ $((SECONDS - begin)) -gt 960 ]; then echo "more: no time left"; continue; fi
  echo "== $part at $((SECONDS - begin))s"
  "$part"
done
echo "== end at $((SECONDS - begin))s"
cat "$R/steps.txt"
if [ -n "${OUT:-}" ]; then cp -r "$O" "$R" "$OUT/"; fi
exit 0
