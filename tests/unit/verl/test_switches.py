"""`enable` and `train` are true or false: a text would count as true whatever it says."""

import pytest

from qat_core.verl.rules import QAT
from tests.verl_configurations import COMMAND, completed, started

TEXTS = ["off", "no", "'false'", "0", "null", "[]"]


@pytest.mark.parametrize("key", ["enable", "train"])
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_neither_true_nor_false_is_refused(key: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"qat\.{key}: .*: use true or false"):
        completed(f"{QAT}.{key}={text}")


@pytest.mark.parametrize("key", ["enable", "train"])
def test_a_variable_of_the_environment_is_a_text(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("SWITCH", "false")
    with pytest.raises(SystemExit, match=rf"error: .*qat\.{key}: 'false': use true or false"):
        started(*COMMAND, f"{QAT}.{key}=${{oc.env:SWITCH}}")
    completed(f"{QAT}.{key}='${{oc.decode:${{oc.env:SWITCH}}}}'")


@pytest.mark.parametrize("value", ["off", None, 0])
def test_workers_refuse_them_too(value: object) -> None:
    engine = pytest.importorskip("qat_core.verl.engine")
    for key in ("enable", "train"):
        with pytest.raises(ValueError, match=rf"qat\.{key}: .*: use true or false"):
            engine.NvFp4Config(**{key: value})
