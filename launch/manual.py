"""The text of `--help`, made from the same places as the configuration itself."""

from __future__ import annotations

import textwrap
from typing import Any

from .keys import Key, groups, keys

EXPORT = "export-draft"
"""The command that takes a folder and no keys."""
KEYS = "keys"
"""The command that takes a new folder for the keys of a link."""
TRACE = "trace"
"""The command that takes the folder of a run."""
COMMANDS = {
    "generate": "answer one prompt; the text streams to the terminal",
    "compare": "all modes on the same prompts, in one table",
    "simulate": "what each mode would gain, from times and an acceptance rate, or from those of a run",
    "bench": "what one pass, one draft step and one message cost here, beside their floors",
    TRACE: "what a run did: a timeline for Perfetto, a picture, and where the time went",
    "doctor": "what will and will not work on this machine, and why",
    KEYS: "write the keys of a link between two machines to a new folder",
    EXPORT: "write the embedded draft to a new folder, as a transformers checkpoint for other systems",
}

_USAGE = """\
usage: amusd COMMAND [-m] [KEY=VALUE ...]
       amusd trace RUN_DIR [sequence=N]
       amusd export-draft FOLDER
       amusd keys FOLDER

{commands}

  -m, --multirun   a sweep: KEY=a,b,c or KEY=range(1,8,2) or GROUP=glob(*); the same command with the
                   run_dir of an interrupted sweep goes on with it
  -h, --help       this text; `amusd COMMAND --help` lists every key
  --version        the version

examples:
  amusd generate prompt="Why is the sky blue?"
  amusd generate mode=synchronous num_speculative_tokens=4 prompt="..."
  amusd compare workload.path=prompts.jsonl workload.num_prompts=16
  amusd simulate accept=0.8 verify_ms=25 draft_ms=2.5 delay_ms=0.05
  amusd compare -m experiment=lookahead_sweep max_lookahead=4,8,16
"""

_NOTES = """\
Texts (prompt, paths, model names, sampling.stop) are taken as typed. Lists: [a,b]; several stop strings: ["a","b"].
A run keeps its files in run_dir (default runs/<date>-<short hash>); a folder that already holds a run is refused.
"""


def overview() -> str:
    """What `amusd --help` prints."""
    return _USAGE.format(commands="\n".join(f"  {name:<16} {text}" for name, text in COMMANDS.items()))


def reference(command: str) -> str:
    """What `amusd COMMAND --help` prints: every group and key, with its default and meaning."""
    lines = [f"amusd {command}: {COMMANDS[command]}", "", "groups (GROUP=CHOICE, files under conf/):"]
    lines += [f"  {group}={' | '.join(options)}" for group, options in groups().items()]
    lines += ["", "keys:"]
    for key in keys().values():
        lines += _entry(key)
    return "\n".join([*lines, "", _NOTES])


def _entry(key: Key) -> list[str]:
    meaning = " ".join(part for part in (key.allowed and f"{key.allowed}.", key.doc) if part)
    head = f"  {key.name}={_plain(key.default)}"
    return [head, *textwrap.wrap(meaning, width=100, initial_indent=" " * 6, subsequent_indent=" " * 6)]


def _plain(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{','.join(str(item) for item in value)}]"
    return str(getattr(value, "value", value))
