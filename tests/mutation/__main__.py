"""`python -m tests.mutation [WORD ...]`: run all rules, or those whose file or name holds a word; say what survived."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutation.rules import RULES
from mutation.runner import BrokenRuleError, check_passes, is_killed, tree_of_links


def main(words: list[str]) -> int:
    chosen = [rule for rule in RULES if not words or any(word in f"{rule.file} {rule.what}" for word in words)]
    ends: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="amusd-mutants-") as folder:
        tree = tree_of_links(Path(folder))
        for rule in chosen:
            try:
                check_passes(rule.tests, tree)
                end = "killed" if is_killed(rule, tree) else "SURVIVED"
            except BrokenRuleError as error:
                end = "BROKEN"
                print(error, file=sys.stderr)  # noqa: T201
            ends[end] = ends.get(end, 0) + 1
            print(f"{end:9} {rule.file}: {rule.what}", flush=True)  # noqa: T201
    print(", ".join(f"{number} {end}" for end, number in ends.items()))  # noqa: T201
    return 0 if set(ends) == {"killed"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
