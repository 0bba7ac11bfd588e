"""The table of architectures has every causal type of transformers, and the document has every one of the table."""

from __future__ import annotations

import json
import re

import pytest
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.launch.processes import ROOT

TABLE = json.loads((ROOT / "experiments/architectures/results/table.json").read_text(encoding="utf-8"))


@pytest.mark.skipif(transformers.__version__ != TABLE["transformers"], reason="the table is of another version")
def test_each_causal_type_was_tried() -> None:
    assert {*TABLE["outcomes"]} == {config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING}


def test_each_one_is_in_one_group_of_the_document() -> None:
    document = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8").partition("| Model types |\n")[2]
    groups = re.findall(r"^\| [^|]+ \| ([^|]+) \|$", document, re.MULTILINE)
    named = [name for group in groups for name in group.split(", ")]
    assert sorted(named) == sorted(["---", *TABLE["outcomes"]])
