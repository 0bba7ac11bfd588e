"""Is a file of answers the same whoever has made it? The same prompts by 1, 2 and 3 engines, one of them killed.

One engine writes the file itself; several run at once, each with its `shard`. The last one gets SIGKILL when it has
written some answers, and is started again. Then `amusd generate` without `shard` makes one file of the parts. The files
are compared byte for byte without `metrics`, the times and counts of a run.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

import hashlib
import json
import os
import subprocess
import time
from contextlib import ExitStack

from amusd.console import table
from amusd.errors import ConfigError
from experiments.common import COMMAND_SECONDS, Document, run, write_results
from experiments.request import ROOT, parser_of, request_of

ENGINES = (1, 2, 3)
KILLED_BEHIND = 10
"""Lines that the last engine has written, at least, when it is killed; half of its own where there are fewer."""
QUESTION = "What is the next number after {}?"


def main() -> None:
    """Answer, kill, gather, write what came out; exit code 1 where two files differ."""
    parser = parser_of("shards", __doc__, num_prompts=200, num_tokens=8)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for `amusd generate`, such as another pair")
    arguments = parser.parse_args()
    request = request_of(arguments)
    from launch.environment import describe_environment

    machine = describe_environment()
    lines = [json.dumps({"prompt": QUESTION.format(number)}) for number in range(1, request.num_prompts + 1)]
    overrides = [*request.workload(lines), "max_num_seqs=4", *arguments.overrides]
    rows = [
        answered_by(count, overrides, min(KILLED_BEHIND, len(lines) // (2 * count)), request.runs / f"engines-{count}")
        for count in ENGINES
    ]
    print(table(tuple(rows[0]), [tuple(map(str, row.values())) for row in rows]))
    workload = {"prompts": QUESTION, "num_prompts": len(lines), "num_tokens": request.num_tokens}
    write_results(request, machine, {"workload": workload, "rows": rows})
    if len({row["sha256"] for row in rows}) > 1 or {row["num_answers"] for row in rows} != {len(lines)}:
        print("the files differ", file=sys.stderr)
        sys.exit(1)


def answered_by(count: int, overrides: list[str], killed_behind: int, folder: Path) -> Document:
    """Have so many engines make one file of answers, in `folder`; what it is, and where one was killed."""
    folder.mkdir(parents=True)
    shards = [[*overrides, f"shard={number}/{count}"] for number in range(1, count + 1)] if count > 1 else [overrides]
    part = folder / (f"answers-{count:05}-of-{count:05}.jsonl" if count > 1 else "answers.jsonl")
    begin = time.monotonic()
    with ExitStack() as stack:
        engines = [stack.enter_context(generate(shard, folder)) for shard in shards]
        stack.callback(lambda: [engine.kill() for engine in engines])
        while num_lines(part) < killed_behind:
            if engines[-1].poll() is not None:
                raise ConfigError(f"amusd generate: exit code {engines[-1].returncode}, before it was killed")
            time.sleep(0.01)
        engines[-1].kill()
        engines[-1].wait()
        num_kept = num_lines(part)
        finish(engines[:-1])
    finish([generate(shards[-1], folder)])
    finish([generate(overrides, folder)])
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    for answer in answers:
        del answer["metrics"]
    kept = "".join(json.dumps(answer) + "\n" for answer in answers)
    return {
        "num_engines": count,
        "num_answers": len(answers),
        "killed_behind": num_kept,
        "seconds": round(time.monotonic() - begin, 1),
        "sha256": hashlib.sha256(kept.encode()).hexdigest(),
    }


def generate(overrides: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start `amusd generate` of this checkout in `folder`."""
    command = [sys.executable, "-m", "launch.main", "generate", "out=answers.jsonl", *overrides]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL)


def finish(engines: list[subprocess.Popen[bytes]]) -> None:
    """Wait for their ends. Raises `ConfigError` where one fails."""
    for engine in engines:
        if engine.wait(COMMAND_SECONDS):
            raise ConfigError(f"amusd generate: exit code {engine.returncode}; what it said is above")


def num_lines(path: Path) -> int:
    """Whole lines of a file; 0 where there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


if __name__ == "__main__":
    run(main)
