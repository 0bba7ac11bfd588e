"""Nothing in the package can turn bytes from elsewhere into code: no pickle and no relative of it, no `eval`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(path for folder in ("amusd", "launch") for path in (ROOT / folder).rglob("*.py"))

FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_NAMES = {"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized"}
FORBIDDEN_BUILTINS = {"eval", "exec", "compile"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}


def called_name(call: ast.Call) -> str:
    return ast.unparse(call.func) if isinstance(call.func, (ast.Name, ast.Attribute)) else ""


def is_true(call: ast.Call, keyword: str) -> bool:
    return any(k.arg == keyword and isinstance(k.value, ast.Constant) and k.value.value is True for k in call.keywords)


def is_false(call: ast.Call, keyword: str) -> bool:
    return any(k.arg == keyword and isinstance(k.value, ast.Constant) and k.value.value is False for k in call.keywords)


def dangers(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_NAMES:
            found.append(f"line {node.lineno}: {node.attr}")
        elif isinstance(node, ast.Call):
            name = called_name(node)
            if name in FORBIDDEN_BUILTINS:
                found.append(f"line {node.lineno}: {name}()")
            if name == "torch.load" and not is_true(node, "weights_only"):
                found.append(f"line {node.lineno}: torch.load without weights_only=True")
            if name.endswith(("numpy.load", "np.load")) and is_true(node, "allow_pickle"):
                found.append(f"line {node.lineno}: numpy.load with pickles")
            if name in SHELLS or is_true(node, "shell"):
                found.append(f"line {node.lineno}: a shell")
            if any(k.arg == "trust_remote_code" for k in node.keywords) and not is_false(node, "trust_remote_code"):
                found.append(f"line {node.lineno}: trust_remote_code may be true")
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found += [
                f"line {node.lineno}: imports {module}"
                for module in modules
                if set(module.split(".")) & FORBIDDEN_MODULES or module == "torch.load"
            ]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_can_run_code_out_of_data(path: Path) -> None:
    assert dangers(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from marshal import loads",
        "from multiprocessing.reduction import pickle",
        "socket.recv_pyobj()",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "from torch import load",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "eval(text)",
    ],
)
def test_the_check_finds_a_danger(source: str) -> None:
    assert len(dangers(source)) >= 1
