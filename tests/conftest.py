"""Shared by the whole suite."""

from __future__ import annotations

import sys
from pathlib import Path

# Test helpers (`protocol.harness`, `strategies` ...) are imported from the tests folder itself.
sys.path.insert(0, str(Path(__file__).parent))
