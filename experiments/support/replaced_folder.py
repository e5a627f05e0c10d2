"""Folders that a program replaces as a whole: bases and data, which hold files alone."""

from pathlib import Path


def require_replaceable(out: Path) -> None:
    """Refuses what no base and no data are, such as results or a run, and would be deleted.

    No file can be asked for instead: Snakemake makes the folder, and removes the manifest of one
    that is made again.

    Args:
        out: what `--out` names; it need not exist.

    Raises:
        ValueError: it is a file, or holds folders.
    """
    if out.is_file() or (out.is_dir() and any(path.is_dir() for path in out.iterdir())):
        raise ValueError(
            f"--out: {out}: would be deleted, and is a file or holds folders, as nothing that this "
            "program makes; name another folder"
        )
