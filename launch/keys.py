"""Which keys and groups a command line can set, read from `amusd/config` and `conf/`: nothing is listed twice."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amusd.config import DecodingConfig, EngineConfig, RunConfig

CONFIG_DIR, CONFIG_NAME = "--config-dir", "--config-name"
"""Hydra's options for configuration files of one's own; `--config-dir=FOLDER` stands among the overrides."""
TEXT_LISTS = frozenset({"sampling.stop"})
"""Lists whose value may be one plain text instead."""

OPTIONS = "drafter.options"
"""The section whose keys are those of a drafter from outside."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One setting."""

    name: str
    """Dotted, as typed: `sampling.max_new_tokens`."""
    hint: Any
    default: Any
    doc: str

    @property
    def is_text(self) -> bool:
        """Whether its value is free text, taken literally."""
        is_union = typing.get_origin(self.hint) in (types.UnionType, typing.Union)
        return is_union and str in typing.get_args(self.hint) and not self.allowed

    @property
    def allowed(self) -> str:
        """The values of a closed choice, or nothing."""
        for hint in (self.hint, *typing.get_args(self.hint)):  # a choice, or a choice or nothing
            if typing.get_origin(hint) is typing.Literal:
                return " | ".join(typing.get_args(hint))
        if isinstance(self.hint, type) and hasattr(self.hint, "__members__"):
            return " | ".join(member.value for member in self.hint.__members__.values())
        return ""


def conf_folder() -> Path:
    """The folder of configuration files: inside the installed package, or beside it in a checkout."""
    here = Path(__file__).resolve().parent
    installed = here / "conf"
    return installed if installed.is_dir() else here.parent / "conf"


@functools.cache
def groups(folder: Path | None = None) -> dict[str, tuple[str, ...]]:
    """Group name -> the names of its files; those in another `folder` of the same shape included."""
    own = sorted(path.name for path in conf_folder().iterdir() if path.is_dir() and not path.name.startswith("_"))
    folders = [conf_folder(), *([] if folder is None else [folder])]
    return {name: tuple(sorted({file.stem for at in folders for file in at.glob(f"{name}/*.yaml")})) for name in own}


@functools.cache
def keys() -> dict[str, Key]:
    """Every key that holds a value, by its dotted name."""
    return {key.name: key for key in _walk(RunConfig, RunConfig(), "")}


@functools.cache
def sections() -> frozenset[str]:
    """The names before a dot: `sampling`, `hardware` ..."""
    return frozenset(name.split(".")[0] for name in keys() if "." in name)


def _walk(cls: type, defaults: Any, prefix: str) -> list[Key]:
    hints = typing.get_type_hints(cls)
    docs = _field_docs(cls)
    if cls is RunConfig:  # what it repeats from these two is documented there
        docs = _field_docs(EngineConfig) | _field_docs(DecodingConfig) | docs
    found: list[Key] = []
    for field in dataclasses.fields(cls):
        hint, value = hints[field.name], getattr(defaults, field.name)
        if dataclasses.is_dataclass(hint):
            found += _walk(typing.cast("type", hint), value, f"{prefix}{field.name}.")
        else:
            found.append(Key(name=prefix + field.name, hint=hint, default=value, doc=docs.get(field.name, "")))
    return found


def _field_docs(cls: type) -> dict[str, str]:
    """Field name -> the docstring under it, joined to one line; those of the classes it is built on included."""
    inherited = [_field_docs(base) for base in cls.__bases__ if dataclasses.is_dataclass(base)]
    docs: dict[str, str] = {name: doc for docs_of_base in inherited for name, doc in docs_of_base.items()}
    body = typing.cast("ast.ClassDef", ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]).body
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
            if isinstance(text, str):
                docs[field.target.id] = " ".join(text.split())
    return docs
