"""Benchmarks: speed, memory and parity, each a program that writes one record, and their parts."""
