"""Put a trained draft into the file that ships with the package.

    python experiments/embedded_draft/package.py --draft DRAFT/ --out amusd/embedded/draft.safetensors

`--mean-with FILE` writes the mean with the draft that the training went on from.

References: Wortsman et al., Robust fine-tuning of zero-shot models, 2022 (arXiv 2109.01903).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from amusd.checkpoints.embedded_draft import DRAFT_FILE, read_draft
from amusd.models.linear import to_int8

_SETTINGS = ("layers", "vocab_size", "epochs", "cooldown", "rows", "lr", "seed")


def main() -> None:
    """Read the command line and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, required=True, help="folder written by train.py")
    parser.add_argument("--mean-with", type=Path, help="file of the draft that the training went on from")
    parser.add_argument("--out", type=Path, default=DRAFT_FILE)
    arguments = parser.parse_args()
    training = json.loads((arguments.draft / "training.json").read_text())
    tensors = load_file(arguments.draft / "weights.safetensors")
    if arguments.mean_with is not None:
        went_on_from = read_draft(arguments.mean_with)
        if went_on_from.facts != training["before"]:
            parser.error(f"{arguments.mean_with}: not the draft that {arguments.draft} went on from")
        tensors = {name: (tensor + went_on_from.tensors[name]) / 2 for name, tensor in tensors.items()}
    facts = {
        "target": "SmolLM2-135M-Instruct",
        "licence": "Apache-2.0",
        "run": {name: training[name] for name in ("tokens", "seconds")}
        | {name: training["settings"][name] for name in _SETTINGS},
        "mean_with_before": arguments.mean_with is not None,
        "before": training["before"],  # of the draft that this one goes on from
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_draft(arguments.out, tensors, torch.from_numpy(np.load(arguments.draft / "output_ids.npy")), facts)
    arguments.out.chmod(0o644)  # safetensors makes it private
    print(
        f"{arguments.out}: {arguments.out.stat().st_size / 1e6:.1f} MB, {read_draft(arguments.out).num_layers} layers"
    )


def write_draft(path: Path, tensors: Mapping[str, torch.Tensor], output_ids: torch.Tensor, facts: object) -> None:
    """Write a draft as `read_draft` reads it: matrices as int8, with a scale per row."""
    stored = {"output_ids": output_ids.to(torch.int32).contiguous()}
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            stored[name], stored[f"{name}.scale"] = to_int8(tensor)
        else:
            stored[name] = tensor.float().contiguous()
    save_file(stored, path, metadata={"facts": json.dumps(facts)})


if __name__ == "__main__":
    main()
