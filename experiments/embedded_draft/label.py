"""Make corpora of texts: compute the target's states over them.

    python experiments/embedded_draft/label.py --text TEXT.npz ... --out CORPORA/

Each corpus has the name of its text; an existing one is skipped.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dataset import Text, batches_by_length, offsets, read_text, to_bits, write_corpus
from teacher import load_teacher

TOKENS_PER_BATCH = 4096


def main() -> None:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="folder of the corpora")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    teacher = load_teacher(arguments.device)
    for path in arguments.text:
        folder = arguments.out / path.stem
        if not folder.exists():
            text, began = read_text(path), time.monotonic()
            write_corpus(folder, text, states_of(text, teacher))
            print(f"{folder}: {text.num_tokens:,} tokens in {time.monotonic() - began:.0f} s", flush=True)


def states_of(text: Text, teacher: Any) -> np.ndarray:
    """uint16 [tokens, hidden]: bits of the states, the rows concatenated."""
    states = np.empty((text.num_tokens, teacher.config.hidden_size), dtype=np.uint16)
    starts = offsets(text)
    with torch.inference_mode():
        for rows in batches_by_length(text, TOKENS_PER_BATCH):
            width = int(text.length[rows].max())
            token_ids = torch.from_numpy(text.token_ids[rows, :width]).to(teacher.device)
            hidden = teacher.base_model(input_ids=token_ids).last_hidden_state  # causal: padding behind changes nothing
            for row, row_bits in zip(rows, to_bits(hidden), strict=True):
                states[starts[row] : starts[row + 1]] = row_bits[: text.length[row]]
    return states


if __name__ == "__main__":
    main()
