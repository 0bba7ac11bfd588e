"""Nothing in the package can turn bytes from elsewhere into code: no pickle and no relative of it.

`eval`, `exec` and shells are found by Ruff's own rules.
"""

from __future__ import annotations

import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(path for folder in ("amusd", "launch") for path in (ROOT / folder).rglob("*.py"))
FORBIDDEN = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "allow_pickle"}
FORBIDDEN |= {"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized", "shell"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_can_run_code_out_of_data(path: Path) -> None:
    with path.open("rb") as file:
        names = [token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME]
    assert not FORBIDDEN & {*names}
    text = path.read_text(encoding="utf-8")
    assert text.count("torch.load") == text.count("weights_only=True")
    assert names.count("trust_remote_code") <= text.count("trust_remote_code=False")
