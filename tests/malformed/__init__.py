"""Malformed input by kind: how it is made, read, and what becomes of it."""
