#!/usr/bin/env bash
# Unpack the parts of build33.py and link the host's CUDA libraries that they leave out:
# unpack33.sh PARTS_DIR SITE_DIR; then PYTHONPATH=SITE_DIR. Says what is still not found.
set -uo pipefail
PARTS=$1 SITE=$2 PYTHON=${PYTHON:-python3}
mkdir -p "$SITE"
[ "$PARTS" = - ] || cat "$PARTS"/part.* | xz -dc -T0 | tar -C "$SITE" -xf - || exit 1
find "$SITE/humming" "$SITE/triton" "$SITE/ninja" -type f \( -name nvrtc_compile -o -name 'ptxas*' -o -name cuobjdump -o -name ninja \) -exec chmod +x {} +
env -u PYTHONPATH "$PYTHON" - "$SITE" <<'PY'
import glob, importlib.util, subprocess, sys
from pathlib import Path
site = Path(sys.argv[1])
torch = Path(importlib.util.find_spec("torch").origin).parent
places = [*torch.parent.glob("nvidia/*/lib"), *torch.parent.glob("nvidia/*/lib64"), torch / "lib"]
places += map(Path, [*glob.glob("/usr/local/cuda*/lib64"), *glob.glob("/usr/local/cuda*/targets/x86_64-linux/lib")])
places += [Path("/usr/lib/x86_64-linux-gnu")]
into = site / "nvidia/cu13/lib"
into.mkdir(parents=True, exist_ok=True)
NAMES = ["libcufft", "libcufftw", "libcusolver", "libcusolverMg", "libcusparse", "libcurand", "libnvJitLink", "libcupti",
         "libnvrtc", "libnvrtc-builtins", "libnvvm", "libcufile", "libcusparseLt", "libcudnn", "libnvshmem_host", "libnvperf"]
for place in places:
    for name in NAMES:
        for file in sorted(place.glob(f"{name}*.so*")):
            link = into / file.name
            if not link.exists() and not link.is_symlink():
                link.symlink_to(file.resolve())
missing = set()
for library in [*site.glob("torch/lib/*.so*"), *site.glob("vllm/*.so"), *site.glob("vllm/vllm_flash_attn/*.so")]:
    env = {"LD_LIBRARY_PATH": f"{into}:{site}/torch/lib:{site}/nvidia/nccl/lib", "PATH": "/usr/bin:/bin"}
    said = subprocess.run(["ldd", str(library)], capture_output=True, text=True, env=env).stdout
    missing |= {f"{line.split()[0]} (of {library.name})" for line in said.splitlines() if "not found" in line}
print("linked", sum(1 for it in into.iterdir() if it.is_symlink()), "libraries; not found:", sorted(missing) or "none")
PY
