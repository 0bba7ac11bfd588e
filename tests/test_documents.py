"""Examples in documents can be pasted: commands compose, files exist, and Python runs."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from amusd.config import RunConfig
from amusd.settings import to_mapping
from launch.compose import compose_config, config_of
from launch.main import main
from tests.launch.processes import ROOT, run

LOGS = ("CHANGELOG.md", "log.md")
DOCUMENTS = sorted(path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")) if path.name not in LOGS)
PLACEHOLDERS = {"ACCEPT": "0.8", "verify_ms=...": "verify_ms=9", "delay_ms=...": "delay_ms=0", "size=B": "size=4"}
OWN_FILES = {
    "mine/experiment/pair.yaml": "# @package _global_\nmode: synchronous\n",
    "my_conf/start.yaml": "defaults: [config, _self_]\n",
    "my_conf/target/mine.yaml": "kind: embedded\n",
    "my_conf/experiment/mine.yaml": "# @package _global_\nmode: synchronous\n",
}
MODULES = {"writing_a_drafter.md": "tests/drafters/test_custom.py"}
PROGRAMS = {"amusd", "make", "python", ".venv/bin/python", "torchrun", "examples/sweep.sh"}


def blocks(path: Path, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def commands(path: Path) -> Iterator[list[str]]:
    for block in blocks(path):
        text = block.replace("\\\n", " ")
        for placeholder, value in PLACEHOLDERS.items():
            text = text.replace(placeholder, value)
        for line in text.splitlines():
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # a picture
                continue
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words and words[0] in PROGRAMS and "..." not in words:  # else a picture of processes
                yield words


LINES = [(path, words) for path in DOCUMENTS for words in commands(path)]


@pytest.mark.parametrize(("path", "words"), LINES, ids=[f"{path.name}: {' '.join(own)[:60]}" for path, own in LINES])
def test_a_command_line_can_be_pasted(
    path: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in OWN_FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    program, *arguments = words
    if program == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in arguments if "=" not in word} <= targets
    elif program == "amusd":
        if "-m" in arguments:  # the first job of a sweep
            arguments = [word if "[" in word else word.split(",")[0] for word in arguments if word != "-m"]
        if arguments[0] not in ("trace", "keys", "export-draft") and "--cfg" not in arguments:
            assert main([*arguments, "--cfg", "job"]) == 0, capsys.readouterr().err
            config_of(OmegaConf.create(capsys.readouterr().out))
    elif program == "torchrun":
        compose_config([word for word in arguments if "=" in word and not word.startswith("--")])
    else:
        scripts = [word for word in words if word.endswith((".py", ".sh"))]
        assert all((ROOT / script).is_file() for script in scripts)


OTHERS = """
CUDA_MPS_ACTIVE_THREAD_PERCENTAGE MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_ NCCL_SOCKET_IFNAME
VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND api_server bitsandbytes compressed deploy enable_thinking
entrypoints generate_until input_batch num_concurrent num_speculative_tokens_per_batch_size req_ids
sample_hidden_states sampling_metadata shuf take_last_draft_probs taskset tokenizer.model torchao
FastChat question.jsonl qualitative requests_changed proposer.requests_changed throughput_1k
"""
"""Names of other people's programs and files, and of what we ask of them."""
OURS = """
target.key target.key_secret target_error.txt target_error phrases.txt _1.json
compare.equal_devices compare.equal_devices=true mixture.py self_prompted self_prompted.npz training_subjects
"""
"""Names that are made from a role or chosen by a reader; and names of the past, each beside its commit or date."""
KNOWN = frozenset((OTHERS + OURS).split())
PLACEHOLDER = re.compile(r"[A-Z]+|urls|Repository|repository|my_conf|\w*_1")
ALL_DOCUMENTS = [*DOCUMENTS, *sorted((ROOT / "experiments").glob("*/README.md"))]
FOLDERS = ("amusd", "launch", "conf", "examples", "experiments", "tests", "docs")
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"]
FILES += [path for path in ROOT.iterdir() if path.is_file()]
CODE = "\n".join(
    path.read_text(encoding="utf-8")
    for path in FILES
    if path != Path(__file__)
    and (path.suffix in (".py", ".yaml", ".toml", ".sh", ".html", ".jsonl") or path.name in ("Makefile", "Dockerfile"))
)
WORDS = {word for text in (CODE, *(path.name for path in FILES)) for word in re.findall(r"\w+", text)}
NAMES = {"/".join(path.parts[-depth:]) for path in FILES for depth in range(1, 7)}


def members_by_class() -> dict[str, set[str]]:
    """The members of each class of the package, by its name in lower case; classes of one name are joined."""
    members: dict[str, set[str]] = {}
    classes = [
        node
        for path in FILES
        if path.suffix == ".py" and ROOT / "amusd" in path.parents
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    for node in classes:
        text = "\n".join(ast.unparse(part) for part in node.body)
        found = re.findall(r"^(?:@\w+\n)?(?:async )?(?:def )?(\w+)(?:\(|:| =)|\bself\.(\w+)", text, re.MULTILINE)
        members.setdefault(node.name.lower(), set()).update("".join(names) for names in found)
    for node in [*classes, *classes]:  # of a base class and its base
        for base in node.bases:
            members[node.name.lower()] |= members.get(ast.unparse(base).split(".")[-1].lower(), set())
    return members


MEMBERS = members_by_class()
ROOTS = {"proposer": "asyncproposer", "async_engine": "asyncengine"}
KEYS = to_mapping(RunConfig())


def unknown_names(span: str) -> set[str]:
    """The names in a span of code that nothing of ours has."""
    found = {name for name in re.findall(r"[A-Za-z_]\w+", span) if not PLACEHOLDER.fullmatch(name)} - WORDS
    if file := re.fullmatch(r"(?:[\w-]+/)*[\w-]+\.(?:py|jsonl?|ya?ml|md|npz|sh|html|safetensors|txt|svg|log|gz)", span):
        is_known = span in NAMES or span in OWN_FILES or span.rpartition("/")[2] in CODE
        found |= set() if is_known or re.search("[A-Z]{3}", span) else {file[0]}
    elif dotted := re.match(r"(\w+)\.([a-z_]\w*)\b(?![/.])", span):
        root, name = dotted.groups()
        section, members = KEYS.get(root), MEMBERS.get(ROOTS.get(root, root.lower()), set())
        has = members | (section.keys() if isinstance(section, dict) else set())
        found |= {dotted[0]} if has and name not in has else set()
    if span.startswith("make ") and f"\n{span.split()[1]}:" not in CODE:
        found.add(span)
    path = re.match(r"(?:docs|tests|examples|experiments|launch|amusd|conf)/[\w./-]*\w", span)
    if path and not (ROOT / path[0]).exists():
        found.add(span)
    chosen = re.match(r"([a-z]+)=(\w+)", span)
    if chosen and (group := ROOT / "conf" / chosen[1]).is_dir() and chosen[2].islower():
        found |= set() if (group / f"{chosen[2]}.yaml").exists() else {span}
    return found - KNOWN


@pytest.mark.parametrize("path", ALL_DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_of_ours_that_a_document_mentions_exists(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    spans = set(re.findall(r"`([^`\n]+)`", text))
    assert {span: found for span in sorted(spans) if (found := unknown_names(span))} == {}


@pytest.mark.parametrize(
    "span", ["engine.status", "sampling.temprature", "Engine.lunch", "docs/nothing.md", "nope.json", "make demos",
             "hardware=three_gpus", "--both-corez", "AMUSD_KEY"]
)  # fmt: skip
def test_a_name_that_nothing_has_is_found(span: str) -> None:
    assert unknown_names(span)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=block[:40], marks=() if path.name == "README.md" else pytest.mark.long)
        for path in DOCUMENTS
        if path.name not in MODULES
        for block in blocks(path, "python")
    ],
)
@pytest.mark.embedded
@pytest.mark.timeout(600)
def test_python_in_a_document_runs(block: str, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(block.replace("max_new_tokens=64", "max_new_tokens=8"))
    done = run([sys.executable, "shown.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout
