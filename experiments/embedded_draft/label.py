"""Compute the target's states over a text: what `train.py` learns from.

    python experiments/embedded_draft/label.py --text TEXT.npz --out STATES/

Two cores need about 25 minutes for 2.8 million tokens (3.2 GB); a GPU a minute or two.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from dataset import STATES, Text, batches_by_length, offsets, read_text
from teacher import load_teacher


def main() -> None:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the states")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens-per-batch", type=int, default=4096)
    arguments = parser.parse_args()
    write_states(read_text(arguments.text), arguments.out, arguments.device, arguments.tokens_per_batch)


def write_states(text: Text, folder: Path, device: str, tokens_per_batch: int) -> None:
    """Write `states.npy` into `folder`, whole or not at all."""
    teacher = load_teacher(device)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "partial.npy"
    hidden_size = teacher.config.hidden_size
    states = np.lib.format.open_memmap(partial, mode="w+", dtype=np.uint16, shape=(text.num_tokens, hidden_size))
    starts = offsets(text)
    began, done = time.monotonic(), 0
    with torch.inference_mode():
        for rows in batches_by_length(text, tokens_per_batch):
            width = int(text.length[rows].max())
            token_ids = torch.from_numpy(text.token_ids[rows, :width]).to(device)
            hidden = teacher.base_model(input_ids=token_ids).last_hidden_state  # causal: padding behind changes nothing
            bits = hidden.to(torch.bfloat16).cpu().view(torch.uint16).numpy()
            for row, row_bits in zip(rows, bits, strict=True):
                states[starts[row] : starts[row + 1]] = row_bits[: text.length[row]]
            done += int(text.length[rows].sum())
            rate = done / (time.monotonic() - began)
            left = (text.num_tokens - done) / rate / 60
            print(f"\r{done:,} of {text.num_tokens:,} tokens, {rate:,.0f}/s, {left:.0f} min left ", end="", flush=True)
    states.flush()
    partial.rename(folder / STATES)
    print()


if __name__ == "__main__":
    main()
