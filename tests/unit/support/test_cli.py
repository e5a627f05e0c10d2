"""What a program that fails prints, and its exit code."""

import pytest

from experiments.support.cli import ProgramError, run_cli
from experiments.verl.trainer import VerlError


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        pytest.param(ValueError("study.yaml: lr: wrong"), "study.yaml: lr: wrong", 2, id="user"),
        pytest.param(FileNotFoundError(2, "No such file", "a"), "a: No such file", 2, id="system"),
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
