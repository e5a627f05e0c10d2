"""Units that figures are given in."""

BYTES_PER_GIB = 2**30
BYTES_PER_MIB = 2**20
MIB_PER_GIB = 2**10


def show_memory(gib: float) -> str:
    """A size in GiB as text, small ones in MiB."""
    return f"{gib:.2f} GiB" if gib >= 1 else f"{MIB_PER_GIB * gib:.2f} MiB"
