"""What a program that fails prints, and its exit code."""

from errno import EACCES, EIO, EISDIR, ENOENT, ENOMEM, ENOSPC, ESTALE, ETIMEDOUT

import pytest

from experiments.support.cli import ProgramError, run_cli
from experiments.verl.trainer import VerlError


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        pytest.param(ValueError("study.yaml: lr: wrong"), "study.yaml: lr: wrong", 2, id="user"),
        pytest.param(OSError(ENOENT, "No such file", "a"), "a: No such file", 2, id="no file"),
        pytest.param(OSError(EACCES, "denied", "a"), "a: denied", 2, id="no permission"),
        pytest.param(OSError(EISDIR, "is a folder", "a"), "a: is a folder", 2, id="folder"),
        pytest.param(OSError(ENOSPC, "full", "a"), "a: full; free disk space", 2, id="no space"),
        pytest.param(OSError(EIO, "broken", "a"), "a: broken", 1, id="disk"),
        pytest.param(OSError(ESTALE, "stale", "a"), "a: stale", 1, id="network disk"),
        pytest.param(OSError(ETIMEDOUT, "late"), "late", 1, id="network"),
        pytest.param(OSError(ENOMEM, "no memory"), "no memory", 1, id="fork"),
        pytest.param(OSError("not fetched"), "not fetched", 1, id="without a number"),
        pytest.param(ProgramError("it ended"), "it ended", 1, id="another program"),
        pytest.param(VerlError("verl ended"), "verl ended", 1, id="verl"),
    ],
)
def test_an_error_is_one_line_and_says_whose_it_is(
    error: Exception, line: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_cli(main)
    assert ended.value.code == code
    assert capsys.readouterr().err == f"error: {line}\n"
