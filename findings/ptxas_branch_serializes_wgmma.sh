#!/usr/bin/env bash
# Versions: nvidia-cuda-nvrtc 13.0.88 and 13.4.92.
# Behaviour: a warp group multiplies by wgmma, columns in registers, with one product under way
#   while those of the next are loaded (commit_group, wait_group 1). Where it waits at an mbarrier
#   between two products of a loop's body, which is a branch, the compiler puts one product after
#   the other (wait_group 0), and says so as C7513. The reason that it gives, other instructions
#   that write a product's input, is as true of the same body with that wait at its top, which it
#   leaves as written. NVRTC returns success; the sentence is in its log alone.
# Output seen:
#   13.0.88: waits at the top: no word; between two products: (C7513) ... serialized
#   13.4.92: likewise
# Why it matters: kernels that unpack 4-bit weights in registers live by this overlap, and a wait
#   for the next stage stands naturally in the middle of the body.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >kernel.cu <<'CU'
__device__ __forceinline__ void wait_at(unsigned barrier) {
  unsigned over;
  do
    asm volatile(
        "{.reg .pred over; mbarrier.try_wait.parity.shared::cta.b64 over, [%1], 0;"
        " selp.u32 %0, 1, 0, over;}"
        : "=r"(over)
        : "r"(barrier)
        : "memory");
  while (!over);
}

extern "C" __global__ void kernel(float* out, int stages, unsigned rows, unsigned barrier) {
  float sum[4] = {};
  for (int stage = 0; stage < stages; ++stage) {
    if (!BETWEEN) wait_at(barrier);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      unsigned columns[4];
      const unsigned at = rows + (stage * 4 + step) * 16;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(columns[i]) : "r"(at + i * 4));
      asm volatile("wgmma.fence.sync.aligned;");
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, "
          "{%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
          : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
          : "r"(columns[0]), "r"(columns[1]), "r"(columns[2]), "r"(columns[3]),
            "l"((unsigned long long)rows));
      asm volatile("wgmma.commit_group.sync.aligned;");
      if (BETWEEN && step == 0) wait_at(barrier);
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    }
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = sum[i];
}
CU
cat >log_of.py <<'PY'
import ctypes
import sys
from pathlib import Path

folder = Path(sys.argv[1], "nvidia", "cu13", "lib")
ctypes.CDLL(str(next(folder.glob("libnvrtc-builtins.so.*"))), ctypes.RTLD_GLOBAL)
nvrtc = ctypes.CDLL(str(folder / "libnvrtc.so.13"))


def log(between):
    options = [b"-arch=sm_90a", b"-DBETWEEN=%d" % between]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = Path("kernel.cu").read_bytes()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None)
    assert nvrtc.nvrtcCompileProgram(program, 2, (ctypes.c_char_p * 2)(*options)) == 0
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, text)
    return text.value.decode()


top, between = log(0), log(1)
print("  waits at the top:", top or "no word")
print("  between two products:", between)
raise SystemExit(0 if not top and "(C7513)" in between else "behaviour changed")
PY
python3 -m venv venv
for version in 13.0.88 13.4.92; do
  venv/bin/pip install --quiet --no-deps --target "$version" "nvidia-cuda-nvrtc==$version"
  echo "nvidia-cuda-nvrtc $version"
  python3 log_of.py "$version"
done
