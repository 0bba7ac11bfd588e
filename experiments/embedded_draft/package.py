"""Put a trained draft into the file that ships with the package.

python experiments/embedded_draft/package.py --draft DRAFT/ --out amusd/embedded/draft.safetensors

Several drafts that were trained from the same one are averaged with equal weights. `--mean-with FILE` adds that one,
with the weight of one draft: the mean has learned from the new text and still knows the old.

References:
    Wortsman et al., Model soups, 2022 (arXiv 2203.05482).
    Wortsman et al., Robust fine-tuning of zero-shot models, 2022 (arXiv 2109.01903).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from amusd.models.embedded_draft import DRAFT_FILE, DraftWeights, read_draft, write_draft

_SETTINGS = ("layers", "vocab_size", "epochs", "cooldown", "rows", "optimizer", "lr", "weight_decay", "seed")
"""Settings of each run that the file keeps."""


def main() -> None:
    """Read the command line and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, required=True, nargs="+", help="folders written by train.py")
    parser.add_argument("--mean-with", type=Path, help="file of the draft that the training went on from")
    parser.add_argument("--out", type=Path, default=DRAFT_FILE)
    arguments = parser.parse_args()
    trainings = [json.loads((folder / "training.json").read_text()) for folder in arguments.draft]
    of_each = [load_file(folder / "weights.safetensors") for folder in arguments.draft]
    output_ids = torch.from_numpy(np.load(arguments.draft[0] / "output_ids.npy"))
    before = trainings[0]["before"]
    if before is None and len(trainings) > 1:
        parser.error(f"{arguments.draft[0]}: trained from no draft, so its weights cannot be averaged with others")
    for folder, training, tensors in zip(arguments.draft, trainings, of_each, strict=True):
        if training["before"] != before or tensors.keys() != of_each[0].keys():
            parser.error(f"{folder}: another draft before it, or other layers, than {arguments.draft[0]}")
    if arguments.mean_with is not None:
        went_on_from = read_draft(arguments.mean_with)
        if went_on_from.facts != before or went_on_from.tensors.keys() != of_each[0].keys():
            parser.error(
                f"{arguments.mean_with}: not the draft that {arguments.draft[0]} went on from, with as many layers"
            )
        of_each.append(dict(went_on_from.tensors))
    facts = {
        "target": "SmolLM2-135M-Instruct",
        "licence": "Apache-2.0",
        "runs": [
            {name: training[name] for name in ("tokens", "seconds")}
            | {name: training["settings"][name] for name in _SETTINGS}
            for training in trainings
        ],
        "mean_with_before": arguments.mean_with is not None,
        "before": before,  # of the draft that this one goes on from
    }
    tensors = {name: torch.stack([each[name] for each in of_each]).mean(dim=0) for name in of_each[0]}
    draft = DraftWeights(tensors, output_ids, facts)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_draft(arguments.out, draft)
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1e6:.1f} MB, {draft.num_layers} layers")


if __name__ == "__main__":
    main()
