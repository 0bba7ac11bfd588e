"""Run one seed again and print its log: `python -m tests.faults SEED`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as in conftest.py

from faults.simulation import run

logging.disable(logging.CRITICAL)  # each damaged frame would have its warning
report = run(int(sys.argv[1]))
sys.stdout.write(report.log)
sys.exit(report.violation is not None)
