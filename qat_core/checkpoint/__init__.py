"""Packed NVFP4 checkpoints in Hugging Face's folder form: write, convert, verify, read."""

from typing import TYPE_CHECKING

from qat_core.lazy_names import load_from
from qat_core.options import CheckpointFormat

if TYPE_CHECKING:
    from qat_core.checkpoint.manifest import verify_manifest
    from qat_core.checkpoint.read import read_checkpoint, verify
    from qat_core.checkpoint.write import convert, export

__all__ = [
    "CheckpointFormat",
    "convert",
    "export",
    "read_checkpoint",
    "verify",
    "verify_manifest",
]

_MODULES = {
    "convert": "qat_core.checkpoint.write",
    "export": "qat_core.checkpoint.write",
    "read_checkpoint": "qat_core.checkpoint.read",
    "verify": "qat_core.checkpoint.read",
    "verify_manifest": "qat_core.checkpoint.manifest",
}

__getattr__ = load_from(__name__, _MODULES)
