"""Tests; a package, since others install one of the same name."""
