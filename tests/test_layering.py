"""The permitted imports: arrows point down only, the core runs without torch, Hydra stops at `launch/`."""

from __future__ import annotations

import ast
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "amusd").rglob("*.py"))
EXPERIMENTS = sorted(f"import experiments.{path.parent.name}.run" for path in (ROOT / "experiments").glob("*/figures"))

LAYERS = (
    {"types", "errors", "huge_pages", "logs", "clock"},
    {"child"},
    {"settings"},
    {"protocol"},
    {"config", "files"},
    {"policies", "tracing"},
    {"sampling", "transport"},
    {"models"},
    {"runner"},
    {"checkpoints"},
    {"drafters"},
    {"runtime"},
    {"contract", "answer", "simulation"},
    {"engine", "workload", "console"},
    {"async_engine"},
    {"serving", "integrations"},
    {"commands"},
    {"__main__"},
)
"""Top-level modules and packages of amusd, from the ground up. A new one has to be given its place here."""
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}
STANDARD_LIBRARY_ONLY = {
    "types", "errors", "huge_pages", "logs", "clock", "child", "config", "files", "settings", "protocol", "policies",
    "tracing", "__main__",
}  # fmt: skip
USES_MSGSPEC = {"config", "settings", "protocol", "tracing"}
IN_ONE_FILE = {"matplotlib": "amusd.commands.plots", "rich": "amusd.console"}
SERVING = {"prometheus_client", "starlette", "uvicorn"}
NEVER_IMPORTED = {"hydra", "omegaconf", "launch", "amusd_launch", "experiments", "tests"}
USES_ENVIRONMENT = {"amusd.huge_pages", "amusd.integrations.vllm_settings", "amusd.transport.torch_distributed"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def imported_names(tree: ast.AST, module: str) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            # `from amusd import engine` imports a layer, `from amusd.config import X` only has to name the module
            names += [f"{base}.{alias.name}" for alias in node.names] if base == "amusd" else [base]
    return names


def violations(source: str, module: str) -> list[str]:
    tree = ast.parse(source)
    own = module.split(".")[1] if "." in module else None
    found = [f"{module} is in no layer"] if own is not None and own not in LEVELS else []
    allowed = sys.stdlib_module_names | ({"msgspec"} if own in USES_MSGSPEC else set())
    for name in imported_names(tree, module):
        top, *rest = name.split(".")
        if top in NEVER_IMPORTED:
            found.append(f"{module} imports {name}")
        elif top == "amusd" and own in LEVELS:
            other = rest[0] if rest else None
            downwards = other in LEVELS and LEVELS[other] < LEVELS[own]
            if other not in (own, "__version__") and not downwards:
                found.append(f"{module} imports {name}")
        elif (
            (top in SERVING and own != "serving")
            or (top != "amusd" and own in STANDARD_LIBRARY_ONLY and top not in allowed)
            or IN_ONE_FILE.get(top, module) != module
        ):
            found.append(f"{module} imports {name}")
    for node in ast.walk(tree):
        of_os = isinstance(node, ast.ImportFrom) and node.module == "os" and ENVIRONMENT & {a.name for a in node.names}
        uses = of_os or (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT)
        if uses and module not in USES_ENVIRONMENT:
            found.append(f"{module} uses the environment in line {node.lineno}")
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "amusd" if parts == ("amusd", "__init__") else ".".join(parts)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_every_module_keeps_to_its_layer(path: Path) -> None:
    assert violations(path.read_text(encoding="utf-8"), module_name(path)) == []


READ_A_DTYPE = (
    "import launch.jobs; from amusd.config import EngineConfig; from amusd.checkpoints import settled; "
    "settled._kept_in = lambda _: 'bfloat16'; "
    "assert settled.settle(EngineConfig(), 'cpu').target.dtype == 'bfloat16'"
)
ANSWER = (
    "from amusd import Engine, SamplingParams; engine = Engine.launch(drafter='ngram'); "
    "engine.generate('hi', SamplingParams(max_new_tokens=2)); engine.close()"
)


@pytest.mark.parametrize(
    ("program", "unwanted"),
    [
        ("import amusd", {"torch", "transformers", "zmq", "hydra"}),
        ("import amusd.commands.simulate", {"transformers", "zmq", "matplotlib"}),
        ("import amusd.commands.trace", {"torch", "numpy", "matplotlib"}),
        ("from launch import compose, jobs, main; compose.compose_config(['drafter=ngram'])", {"torch"}),
        ("from launch.environment import describe_environment; describe_environment()", {"torch"}),
        ("; ".join(EXPERIMENTS), {"torch", "matplotlib"}),
        (READ_A_DTYPE, {"torch"}),  # so that workers start first
        pytest.param(ANSWER, {"transformers"}, marks=pytest.mark.embedded),
    ],
)
def test_a_fresh_interpreter_loads_nothing_heavy(program: str, unwanted: set[str]) -> None:
    code = f"import sys; {program}\nsys.stdout.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert not unwanted & set(done.stdout.split())


# Nothing turns bytes from elsewhere into code: no pickle and no relative of it. Ruff finds `eval`, `exec` and shells.

PROGRAMS = [*MODULES, *sorted((ROOT / "launch").rglob("*.py"))]
FORBIDDEN = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "allow_pickle"}
FORBIDDEN |= {"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized", "shell"}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_can_run_code_out_of_data(path: Path) -> None:
    with path.open("rb") as file:
        names = [token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME]
    assert not FORBIDDEN & {*names}
    text = path.read_text(encoding="utf-8")
    assert text.count("torch.load") == text.count("weights_only=True")
    assert names.count("trust_remote_code") <= text.count("trust_remote_code=False")
