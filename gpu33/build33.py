#!/usr/bin/env python3
"""Pack vLLM 0.33 with torch 2.14 for a GPU host that has Python 3.12 and torch 2.11+cu130.

    PYENV_VERSION=3.12.1 python3.12 build33.py OUT_DIR     # OUT_DIR/part.00 ..., 58 MiB each
    bash unpack33.sh OUT_DIR /tmp/vllm33/site33                   # on the host; then PYTHONPATH=/tmp/vllm33/site33

VLLM and TORCH choose another pair (0.29.0 and 2.13.0). CUDA libraries that the host has are left
out; unpack33.sh links the host's own. Machine code but for sm_90 is zeroed. What is left out is
not needed on Hopper: FlashAttention-4's DSL, DeepSeek's and Blackwell's kernels, media.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, os.environ["GPU_BUNDLE"])  # a folder with build.py, which has slim_fatbin
from build import slim_fatbin

VLLM, TORCH = os.environ.get("VLLM", "0.33.0"), os.environ.get("TORCH", "2.14.0")
MORE = ["accelerate", "pytest", "hypothesis"]  # the project's own, for Python 3.12
PART_BYTES = 60817408
PLATFORMS = [f"--platform=manylinux_2_{n}_x86_64" for n in range(5, 41)]
PLATFORMS += [f"--platform={p}_x86_64" for p in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
TARGET = ["--only-binary=:all:", *PLATFORMS, "--implementation=cp", "--abi=cp312", "--abi=abi3", "--abi=none"]
TARGET += ["--python-version=3.12"]
HOSTS = ["cufft", "cusolver", "cusparse", "curand", "nvjitlink", "cuda-cupti", "cuda-nvrtc", "nvvm", "cuda-nvcc"]
HOSTS += ["cuda-crt", "nvshmem-cu13", "cufile", "cusparselt-cu13", "cudnn-cu13"]
LEFT_OUT = {f"nvidia-{it}" for it in HOSTS} | {"pynvvideocodec", "torchaudio", "torchcodec", "tokenspeed-triton"}
LEFT_OUT |= {"tilelang", "flashinfer-python", "nccl4py", "nccl-extensions", "opencv-python-headless", "z3-solver", "nvidia-cutlass-dsl"}
LEFT_OUT |= {f"nvidia-cutlass-dsl-libs-{it}" for it in ("base", "core", "cu12", "cu13")}
DROP = ["triton/backends/nvidia/bin/ptxas-blackwell", "triton/backends/nvidia/bin/nvdisasm"]
DROP += ["triton/_C/libproton.so", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/_qutlass_C.abi3.so", "bin"]
DROP += ["xgrammar/lib/libxgrammar.a", "pycountry/locales"]


def pip(*args: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *args], check=True)


def pins(out: Path) -> list[str]:
    """Exact versions for CPython 3.12, without what is left out."""
    report = out / "report.json"
    asked = [f"vllm=={VLLM}", f"torch=={TORCH}", *MORE]
    pip("install", "--dry-run", "-q", "--ignore-installed", f"--report={report}", f"--target={out}/none", *TARGET, *asked)
    found = [it["metadata"] for it in json.loads(report.read_text())["install"]]
    named = {it["name"].lower().replace("_", "-"): it["version"] for it in found}
    kept = [f"{name}=={version}" for name, version in sorted(named.items()) if name not in LEFT_OUT]
    (out / "pins.txt").write_text("\n".join(kept) + "\n")
    return kept


def slim(site: Path) -> None:
    for name in DROP:
        target = site / name
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    for library in site.rglob("*.so*"):
        if library.is_file() and not library.is_symlink() and library.stat().st_size > 1 << 20:
            slim_fatbin(library)
    for library in site.glob("vllm/third_party/deep_gemm/_C.cpython-3*.so"):  # of 0.29
        if "cpython-312" not in library.name:
            library.unlink()
    subprocess.run(["strip", "--strip-unneeded", str(site / "triton/_C/libtriton.so")], check=True)


def pack(site: Path, out: Path) -> None:
    for stale in out.glob("part.*"):
        stale.unlink()
    archive = subprocess.Popen(["tar", "-C", site, "-cf", "-", "."], stdout=subprocess.PIPE)
    xz = subprocess.Popen(["xz", "-T2", "-3"], stdin=archive.stdout, stdout=subprocess.PIPE)
    subprocess.run(["split", "-d", "-b", str(PART_BYTES), "-", f"{out}/part."], stdin=xz.stdout, check=True)
    if archive.wait() or xz.wait():
        raise SystemExit("packing failed")


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    out = Path(sys.argv[1]).resolve()
    site, wheels = out / "site", out / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(site, ignore_errors=True)
    wanted = pins(out)
    print(f"{len(wanted)} pins", flush=True)
    pip("download", "-q", "--no-deps", f"--dest={wheels}", *TARGET, *wanted)
    index = ["--no-index", f"--find-links={wheels}", f"--target={site}", "--no-compile"]
    pip("install", "-q", "--no-deps", *index, *TARGET, *wanted)
    print("installed", flush=True)
    slim(site)
    print("slimmed", flush=True)
    pack(site, out)
    sizes = [part.stat().st_size for part in sorted(out.glob("part.*"))]
    print(f"{len(sizes)} parts, {sum(sizes) / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
