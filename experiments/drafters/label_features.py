"""Compute the target's hidden states over a text: the features that `train_drafter.py` learns from.

    python experiments/drafters/label_features.py --text TEXT.npz --out FEATURES/ --tokens 600000

Rows are read in a random order fixed by the seed and written in shards, each whole or not at all, so that a training
can begin before the last shard is there. Bytes: 1,152 a token and layer for a hidden size of 576.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1] / "embedded_draft"))  # its text files and its teacher

from dataset import Text, batches_by_length, offsets, read_text
from features import SHARD_ROWS, layer_ids, row_order, shard_path
from teacher import load_teacher


def main() -> None:
    """Read the command line and label."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the features")
    parser.add_argument("--tokens", type=int, default=600_000, help="label whole rows until there are so many tokens")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens-per-batch", type=int, default=4096)
    arguments = parser.parse_args()
    write_features(read_text(arguments.text), arguments)


def write_features(text: Text, arguments: argparse.Namespace) -> None:
    """Write the shards that are not there yet."""
    teacher = load_teacher(arguments.device)
    arguments.out.mkdir(parents=True, exist_ok=True)
    order, num_tokens, began = row_order(text), 0, time.monotonic()
    for start in range(0, len(order), SHARD_ROWS):
        if num_tokens >= arguments.tokens:
            break
        rows = order[start : start + SHARD_ROWS]
        num_tokens += int(text.length[rows].sum())
        path = shard_path(arguments.out, start // SHARD_ROWS)
        if not path.exists():
            states = hidden_states(teacher, text.select(rows), arguments.tokens_per_batch)
            partial = path.with_suffix(".partial.npy")
            np.save(partial, states)
            partial.rename(path)
        print(f"{num_tokens:,} tokens, {time.monotonic() - began:.0f} s", flush=True)


@torch.inference_mode()
def hidden_states(teacher: torch.nn.Module, text: Text, tokens_per_batch: int) -> np.ndarray:
    """uint16 [tokens, layers, hidden]: bits of the bfloat16 states of `layer_ids`, the rows one behind the other."""
    layers = layer_ids(teacher.config.num_hidden_layers)
    states = np.empty((text.num_tokens, len(layers), teacher.config.hidden_size), dtype=np.uint16)
    starts = offsets(text)
    for rows in batches_by_length(text, tokens_per_batch):
        width = int(text.length[rows].max())
        token_ids = torch.from_numpy(text.token_ids[rows, :width]).to(teacher.device)
        outputs = teacher.base_model(input_ids=token_ids, output_hidden_states=True).hidden_states
        chosen = torch.stack([outputs[layer] for layer in layers], dim=2)  # causal: padding behind changes nothing
        bits = chosen.to(torch.bfloat16).cpu().view(torch.uint16).numpy()
        for row, row_bits in zip(rows, bits, strict=True):
            states[starts[row] : starts[row + 1]] = row_bits[: text.length[row]]
    return states


if __name__ == "__main__":
    main()
