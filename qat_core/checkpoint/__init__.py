"""Packed NVFP4 checkpoints in Hugging Face's folder form: write, convert, verify, read."""

from qat_core.checkpoint.manifest import verify_manifest
from qat_core.checkpoint.read import read_checkpoint
from qat_core.checkpoint.write import convert, export
from qat_core.options import CheckpointFormat

__all__ = ["CheckpointFormat", "convert", "export", "read_checkpoint", "verify_manifest"]
