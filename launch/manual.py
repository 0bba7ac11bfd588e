"""The text of `--help`, made from the same places as the configuration itself."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from amusd.config import DecodingConfig, EngineConfig

from .keys import Key, groups, keys

EXPORT = "export-draft"
"""The command that takes a folder and no keys."""
KEYS = "keys"
"""The command that takes a new folder for the keys of a link."""
TRACE = "trace"
"""The command that takes the folder of a run."""
COMMANDS = {
    "generate": "answer one prompt, whose text streams to the terminal, or a file of them into another file",
    "serve": "answer over HTTP as OpenAI's servers do, and in a browser, until a signal ends it",
    "compare": "all modes on the same prompts, in one table",
    "simulate": "what each mode would gain, from times and an acceptance rate, or from those of a run",
    "bench": "what one pass, one draft step and one message cost here, beside their floors",
    TRACE: "what a run did: a timeline for Perfetto, a picture, and where the time went",
    "doctor": "what will and will not work on this machine, and why",
    KEYS: "write the keys of a link between two machines to a new folder",
    EXPORT: "write the embedded draft to a new folder, as a transformers checkpoint for other systems",
}

_ENGINE = frozenset(
    {"output", "accept", "pair", "drafter", *(field.name for field in dataclasses.fields(EngineConfig))}
)
_SCHEDULE = frozenset(field.name for field in dataclasses.fields(DecodingConfig))
_ANSWERS = _ENGINE | _SCHEDULE | {"run_dir", "sampling", "workload", "experiment"}
_OWN = {
    "generate": _ANSWERS | {"prompt", "out"},
    "serve": (_ANSWERS - {"sampling", "workload", "output", "experiment"}) | {"serve", "ray"},
    "compare": (_ANSWERS - {"max_num_seqs"}) | {"compare"},
    "simulate": _SCHEDULE
    | {"output", "run_dir", "accept", "verify_ms", "draft_ms", "delay_ms", "calibration", "simulate"}
    | {"drafter.kind", "drafter.accept_next", "max_verify_width"},
    "bench": (_ENGINE - {"max_num_seqs"}) | {"run_dir", "bench"},
    "doctor": _ENGINE,
}
"""The keys and sections that a command looks at, and whether experiments are for it."""

_USAGE = """\
usage: amusd COMMAND [-m] [KEY=VALUE ...]
       amusd trace RUN_DIR [sequence=N]
       amusd export-draft FOLDER
       amusd keys FOLDER

{commands}

  -m, --multirun         a sweep: KEY=a,b,c or KEY=range(1,8,2) or GROUP=glob(*); the same command with the
                         run_dir of an interrupted sweep goes on with it
  -c, --cfg job          print the configuration instead of running
  -cd, --config-dir DIR  DIR/GROUP/NAME.yaml can be chosen too; a file of your own: experiment=/path/mine.yaml
  -cn, --config-name N   start from DIR/N.yaml, which may begin with `defaults: [config, _self_]`
  -h, --help             this text; `amusd COMMAND --help` lists the keys of a command
  --version              the version

examples:
  amusd generate prompt="Why is the sky blue?"
  amusd generate mode=synchronous num_speculative_tokens=4 prompt="..."
  amusd generate target=/models/Llama-3.1-8B-Instruct drafter=/models/Llama-3.2-1B-Instruct prompt="..."
  amusd generate workload.path=prompts.jsonl out=answers.jsonl max_num_seqs=8
  amusd serve max_num_seqs=8 serve.port=8000
  amusd compare workload.path=prompts.jsonl workload.num_prompts=16
  amusd simulate accept=0.8 verify_ms=25 draft_ms=2.5 delay_ms=0.05
  amusd compare -m experiment=lookahead_sweep max_lookahead=4,8,16
"""

_NOTES = """\
Texts (prompt, paths, model names, sampling.stop) are taken as typed. Lists: [a,b]; several stop strings: ["a","b"].
A run keeps its files in run_dir (default runs/<date>-<short hash>); a folder that already holds a run is refused.
"""


def overview() -> str:
    """Return the text of `amusd --help`."""
    return _USAGE.format(commands="\n".join(f"  {name:<16} {text}" for name, text in COMMANDS.items()))


def own_keys(command: str) -> list[Key]:
    """What `command` looks at."""
    own = _OWN[command]
    return [key for key in keys().values() if {key.name, key.name.split(".")[0]} & own]


def reference(command: str) -> str:
    """Return the text of `amusd COMMAND --help`: its groups and keys, with default and meaning."""
    own = own_keys(command)
    sections = {key.name.split(".")[0] for key in own if "." in key.name}
    chosen = {group: options for group, options in groups().items() if {group} & (sections | _OWN[command])}
    lines = [f"amusd {command}: {COMMANDS[command]}", "", "groups (GROUP=CHOICE, files under conf/):"]
    lines += [f"  {group}={' | '.join(options)}" for group, options in chosen.items()]
    lines += ["", "keys:"]
    for key in own:
        lines += _entry(key)
    return "\n".join([*lines, "", _NOTES])


def _entry(key: Key) -> list[str]:
    meaning = " ".join(part for part in (key.allowed and f"{key.allowed}.", key.doc) if part)
    head = f"  {key.name}={_plain(key.default)}"
    return textwrap.wrap(f"{head:<40} {meaning}", width=120, subsequent_indent=" " * 41, break_on_hyphens=False)


def _plain(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{','.join(str(item) for item in value)}]"
    return str(getattr(value, "value", value))
