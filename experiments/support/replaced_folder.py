"""Folders that a program replaces as a whole: only its own."""

from pathlib import Path


def require_own(out: Path, manifest: str, others: str = "") -> None:
    """Refuses a folder that a program would delete though it has not made it.

    Args:
        out: what `--out` names; it need not exist.
        manifest: the file that each folder of this program holds.
        others: a name in folders of other programs that hold a file of that name too.

    Raises:
        ValueError: there is something else.
    """
    is_own = (out / manifest).is_file() and not (others and (out / others).exists())
    if out.exists() and not is_own:
        raise ValueError(
            f"--out: {out}: is there, holds no {manifest} of this program, and would be deleted; "
            "name another folder"
        )
