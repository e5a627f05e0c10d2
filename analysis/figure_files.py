"""The files that a study's figures are, named without drawing any: the workflow reads it too."""

NAMES = ("kl", "accuracy", "learning", "training", "memory", "step_time")
FORMATS = ("png", "svg")
