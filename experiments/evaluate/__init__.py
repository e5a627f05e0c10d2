"""Offline accuracy of checkpoints."""
