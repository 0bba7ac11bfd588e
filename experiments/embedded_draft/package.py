"""Put a trained draft into the file that ships with the package.

python experiments/embedded_draft/package.py --draft DRAFT/ --out amusd/embedded/draft.safetensors

With `--mean-with` the file holds the mean of the weights and of those that the training went on from: a draft that
learned from new text and still knows the old.

References:
    Wortsman et al., Robust fine-tuning of zero-shot models, 2022 (arXiv 2109.01903).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from amusd.models.embedded_draft import DRAFT_FILE, DraftWeights, digest_of, read_draft, write_draft


def main() -> None:
    """Read the command line and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, required=True, help="folder written by train.py")
    parser.add_argument("--mean-with", type=Path, help="file of the draft that the training went on from")
    parser.add_argument("--out", type=Path, default=DRAFT_FILE)
    arguments = parser.parse_args()
    training = json.loads((arguments.draft / "training.json").read_text())
    settings = training["settings"]
    facts = {
        "target": "SmolLM2-135M-Instruct",
        "licence": "Apache-2.0",
        "tokens": training["tokens"],
        "seconds": training["seconds"],
        "before": training["before"],  # of the draft that this one goes on from
        **{name: settings[name] for name in ("layers", "epochs", "rows", "optimizer", "lr", "weight_decay", "seed")},
    }
    tensors = load_file(arguments.draft / "weights.safetensors")
    if arguments.mean_with is not None:
        before = read_draft(arguments.mean_with)
        if before.facts != training["before"] or before.tensors.keys() != tensors.keys():
            parser.error(
                f"{arguments.mean_with}: not the draft that {arguments.draft} went on from, with as many layers"
            )
        facts["mean"] = "of these weights and those before"
        tensors = {name: (tensor + before.tensors[name]) / 2 for name, tensor in tensors.items()}
    draft = DraftWeights(
        tensors,
        torch.from_numpy(np.load(arguments.draft / "output_ids.npy")),
        facts,
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_draft(arguments.out, draft)
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1e6:.1f} MB, {draft.num_layers} layers")
    print(f"DRAFT_DIGEST of amusd/models/embedded_draft.py, if it is to ship: {digest_of(arguments.out)}")


if __name__ == "__main__":
    main()
