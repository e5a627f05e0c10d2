"""Simulated studies: which intervals keep their level with few seeds and heavy tails."""
