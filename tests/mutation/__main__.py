"""`python -m tests.mutation [WORD ...]`: try all rules, or those whose file or name holds one of the words."""

from __future__ import annotations

import sys

import pytest

words = [" and ".join(word.replace("'", " ").split()) for word in sys.argv[1:]]
options = ["-v", "-n", "0", "-m", "long", "-k", " or ".join(f"({word})" for word in words)]
sys.exit(pytest.main([*options, "tests/mutation"]))
