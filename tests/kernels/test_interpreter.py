"""Runs the kernel tests in Triton's interpreter, in a process that knows it from the start."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

KERNEL_TESTS = sorted(map(str, Path(__file__).parent.glob("test_*_equal_reference.py")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are tested on the GPU itself")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *KERNEL_TESTS]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
