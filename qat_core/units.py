"""Units that figures are given in."""

BYTES_PER_GIB = 2**30
