"""Put a trained draft into the file that ships with the package.

python experiments/embedded_draft/package.py --draft DRAFT/ --out amusd/embedded/draft.safetensors
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from amusd.models.embedded_draft import DRAFT_FILE, DraftWeights, digest_of, write_draft


def main() -> None:
    """Read the command line and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, required=True, help="folder written by train.py")
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
    draft = DraftWeights(
        load_file(arguments.draft / "weights.safetensors"),
        torch.from_numpy(np.load(arguments.draft / "output_ids.npy")),
        facts,
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_draft(arguments.out, draft)
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1e6:.1f} MB, {draft.num_layers} layers")
    print(f"DRAFT_DIGEST of amusd/models/embedded_draft.py, if it is to ship: {digest_of(arguments.out)}")


if __name__ == "__main__":
    main()
