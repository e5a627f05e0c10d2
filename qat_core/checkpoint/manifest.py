"""SHA-256 of every file of a checkpoint, in the form that `sha256sum --check` reads."""

import hashlib
from pathlib import Path

MANIFEST = "SHA256SUMS"
FIX = "copy or convert the checkpoint again"


def write_manifest(folder: Path) -> None:
    """Write SHA256SUMS over all files of the folder and those in folders below."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{_sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / MANIFEST).write_text("".join(lines))


def verify_manifest(folder: Path) -> None:
    """ValueError if a file was changed, is missing, or is not listed: weights, settings."""
    digests = _read_manifest(folder / MANIFEST)
    for name, digest in digests.items():
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: listed in {MANIFEST} but missing; {FIX}")
        if _sha256(folder / name) != digest:
            raise ValueError(
                f"{folder / name}: SHA-256 differs from {MANIFEST}: damaged or changed; {FIX}"
            )
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".json") and path.name not in digests:
            raise ValueError(f"{path}: not listed in {MANIFEST}; remove it, or {FIX}")


def remove_listed(folder: Path, name: str) -> None:
    """Removes a file, if it is there, and its digest; a kill in between damages nothing.

    The digests of the other files stay as they are, so that damage stays known.
    """
    manifest = folder / MANIFEST
    if manifest.is_file():
        lines = manifest.read_text().splitlines(keepends=True)
        renewed = manifest.with_suffix(".partial")
        renewed.write_text("".join(line for line in lines if not line.endswith(f"  {name}\n")))
        renewed.replace(manifest)
    (folder / name).unlink(missing_ok=True)


def _read_manifest(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise ValueError(f"{path}: missing, so nothing can be verified; {FIX}")
    digests = {}
    for line in path.read_text(encoding="utf-8", errors="backslashreplace").splitlines():
        digest, _, name = line.partition("  ")
        if len(digest) != 64 or not name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{path}: {line!r} is not a line of sha256sum; {FIX}")
        digests[name] = digest
    return digests


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
