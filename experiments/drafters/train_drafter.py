"""Train a drafter that reads the target's hidden states, and write it in a published layout.

    python experiments/drafters/train_drafter.py eagle3 --text TEXT.npz ... --out OUT/ --minutes 40

OUT gets `config.json`, `model.safetensors`, `training.json` (settings, curve, cost) and `checkpoint.pt`, from which an
interrupted training resumes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "embedded_draft"))  # its text files, teacher and measures

from dataset import join, read_text
from layouts import drafter_config, write_drafter
from losses import agreement, cross_entropy, distributions
from networks import Batch, DFlash, Eagle1, Eagle3, Medusa, layer_ids
from progress import Progress
from teacher import load_teacher, stop_ids
from train import most_frequent, schedule

NETWORKS = {"eagle3": Eagle3, "eagle1": Eagle1, "medusa": Medusa, "dflash": DFlash}
STEPS = {"eagle3": 4, "eagle1": 2, "medusa": 4, "dflash": 7}
"""Distances from the last true feature that a training covers."""
MEASURED_STEPS = {"eagle3": 6, "eagle1": 6, "medusa": 4, "dflash": 7}
SHORT_SHARE = 0.5
"""Share of the time in which EAGLE learns at most two distances."""
DECAY = 0.8
"""Weight of each distance against the one before."""
COOLDOWN = 0.6
"""Share of the time in which the learning rate falls to zero."""
WEIGHT_DECAY = 0.05
HELD_OUT_ROWS = 64
"""Rows that are held out from training."""
MEASURED_ROWS = 32
"""Held-out rows that a measurement reads."""
MEASURE_SECONDS, SAVE_SECONDS = 480.0, 180.0


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=NETWORKS)
    parser.add_argument("--text", type=Path, required=True, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=40, help="time to learn for; the learning rate follows it")
    parser.add_argument("--layers", type=int, default=2, help="of dflash")
    parser.add_argument("--vocab-size", type=int, default=7680, help="tokens that the loss, and EAGLE-3, know")
    parser.add_argument("--mask-token", type=int, default=16, help="of dflash: a token that no text holds")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch")
    parser.add_argument("--lr", type=float, default=0.001, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    train(parser.parse_args())


def train(arguments: argparse.Namespace) -> None:
    """The whole run."""
    torch.manual_seed(arguments.seed)
    run = Run(arguments)
    run.resume()
    measured, saved = run.progress.seconds, time.monotonic()
    for rows in run.batches():
        run.learn(rows)
        if run.progress.seconds - measured > MEASURE_SECONDS and not run.is_over:
            run.evaluate()
            measured = run.progress.seconds
        if time.monotonic() - saved > SAVE_SECONDS:
            run.save()
            saved = time.monotonic()
    run.evaluate()
    run.save()


class Run:
    """A drafter in training."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._text = join([read_text(path) for path in arguments.text])
        order = np.random.default_rng(0).permutation(len(self._text.length))
        self._held_out, self._learned_from = np.split(order, [min(HELD_OUT_ROWS, len(order) // 2)])
        self._teacher = teacher = load_teacher(arguments.device)
        self._embedding = teacher.get_input_embeddings().weight.detach()
        self._head = teacher.get_output_embeddings().weight.detach()
        answers = self._text.select(self._learned_from)
        output_ids = np.sort(most_frequent(answers, arguments.vocab_size, len(self._head), sorted(stop_ids(teacher))))
        self._output_ids = torch.from_numpy(output_ids).to(arguments.device)
        self._output_head = self._head[self._output_ids].contiguous()
        self._config = drafter_config(arguments, teacher.config)
        self._network = NETWORKS[arguments.method](self._config).to(arguments.device)
        if isinstance(self._network, DFlash):
            self._network.mask_embedding = self._embedding[arguments.mask_token].float()
        states = self._load(self._learned_from[:8]).features.float()
        self._network.start_from(teacher, states.square().mean(dim=-1).sqrt().flatten(0, 1).median(dim=0).values)
        matrices = [parameter for parameter in self._network.parameters() if parameter.ndim == 2]
        vectors = [parameter for parameter in self._network.parameters() if parameter.ndim != 2]
        groups = [
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.95))
        self._num_steps = STEPS[arguments.method]

        self.progress = Progress(arguments.out)

    @property
    def is_over(self) -> bool:
        """Whether the training time is over."""
        return self.progress.seconds >= self._arguments.minutes * 60

    def batches(self) -> Iterator[np.ndarray]:
        """Row numbers of batches until the time is over; every labelled row once in each epoch."""
        length, size = self._text.length, self._arguments.rows
        random = np.random.default_rng((self._arguments.seed, self.progress.step))
        while True:
            rows = random.permutation(self._learned_from)
            rows = rows[np.argsort(length[rows], kind="stable")]
            parts = [rows[start : start + size] for start in range(0, len(rows), size)]
            for part in random.permutation(len(parts)):
                if self.is_over:
                    return
                yield parts[part]

    def learn(self, rows: np.ndarray) -> None:
        """One step."""
        began, whole = time.monotonic(), round(self._arguments.minutes * 60)
        for group in self._optimizer.param_groups:
            group["lr"] = self._arguments.lr * schedule(min(whole - 1, int(self.progress.seconds)), whole, COOLDOWN)
        batch = self._load(rows)
        self.progress.learn(self._network, self._optimizer, self._loss(batch))
        told = self.progress.stepped(began, int(self._text.length[rows].sum()))
        print(f"{told}, {self.progress.seconds / 60:.1f} min", flush=True)

    def _loss(self, batch: Batch) -> Tensor:
        states = batch.features[:, :, -1].flatten(0, 1)
        counted = batch.counted.flatten()
        targets = distributions(states[counted], self._output_head)
        place = counted.cumsum(0) - 1  # where a position's target is
        entropy = -torch.special.xlogy(targets, targets).sum(dim=-1)
        with torch.autocast(states.device.type, dtype=torch.bfloat16):
            predictions = self._network.predict(batch, self._distances())
        total, weights = torch.zeros((), device=states.device), 0.0
        for ahead, prediction in enumerate(predictions):
            index = place[prediction.positions]
            weight = DECAY**ahead
            loss = cross_entropy(prediction.states, targets[index], self._output_head) - entropy[index].sum()
            loss = loss / max(1, len(index))
            if isinstance(self._network, Eagle1):
                loss = loss + F.smooth_l1_loss(prediction.states, states[prediction.positions].float())
            total, weights = total + weight * loss, weights + weight
        return total / weights

    def _distances(self) -> int:
        """Number of distances in this step: few at first, while the states fed back are poor."""
        is_early = self.progress.seconds < SHORT_SHARE * self._arguments.minutes * 60
        return min(2, self._num_steps) if is_early and self._arguments.method.startswith("eagle") else self._num_steps

    @torch.no_grad()
    def evaluate(self) -> None:
        """Greedy agreement and sampled acceptance at each distance, over answers of held-out rows."""
        steps = MEASURED_STEPS[self._arguments.method]
        greedy: list[list[Tensor]] = [[] for _ in range(steps)]
        sampled: list[list[Tensor]] = [[] for _ in range(steps)]
        held_out = self._held_out[:MEASURED_ROWS]
        generator_state = torch.get_rng_state()
        torch.manual_seed(0)  # blocks are drawn at the same places every time
        for rows in np.array_split(held_out, math.ceil(len(held_out) / 8)):
            batch = self._load(rows)
            states = batch.features[:, :, -1].flatten(0, 1)
            with torch.autocast(states.device.type, dtype=torch.bfloat16):
                predictions = self._network.predict(batch, steps)
            for ahead, prediction in enumerate(predictions):
                nothing = prediction.positions.new_zeros(len(prediction.positions), 1)  # no n-gram cache beside it
                known = (nothing, torch.full_like(nothing, -torch.inf, dtype=torch.float32), nothing.float())
                wanted = states[prediction.positions]
                parts = agreement(prediction.states, wanted, self._head, self._output_ids, *known)
                greedy[ahead].append(parts[0].float())
                sampled[ahead].append(parts[1])
        torch.set_rng_state(generator_state)
        means = ([round(float(torch.cat(parts).mean()), 4) for parts in kind] for kind in (greedy, sampled))
        self.progress.measured(*means)

    def save(self) -> None:
        """Write the drafter, the report and the checkpoint, each whole or not at all."""
        arguments = self._arguments
        write_drafter(arguments.out, arguments.method, self._config, self._network, self._head, self._output_ids)
        settings = {name: value for name, value in vars(arguments).items() if name not in ("text", "out")}
        report = {"settings": settings, "rows": len(self._learned_from), "curve": self.progress.curve}
        (arguments.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
        networks = {"network": self._network.state_dict(), "optimizer": self._optimizer.state_dict()}
        self.progress.save(**networks, output_ids=self._output_ids)

    def resume(self) -> None:
        """Resume from the checkpoint, if there is one."""
        saved = self.progress.resume()
        if saved is None:
            self.evaluate()
            return
        self._network.load_state_dict(saved["network"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self._output_ids = saved["output_ids"].to(self._arguments.device)
        self._output_head = self._head[self._output_ids].contiguous()

    def _load(self, rows: np.ndarray) -> Batch:
        text, device = self._text, self._arguments.device
        width = int(text.length[rows].max())
        token_ids = torch.from_numpy(text.token_ids[rows, :width])
        counted = np.zeros((len(rows), width), dtype=bool)
        counted[:, :-1] = text.answer[rows, 1:width]
        token_ids = token_ids.to(device)
        embedded = F.embedding(token_ids, self._embedding).float()
        with torch.no_grad():
            states = self._teacher.base_model(input_ids=token_ids, output_hidden_states=True).hidden_states
        layers = layer_ids(len(states) - 1)
        features = torch.stack([states[layer] for layer in layers], dim=2)  # causal: padding behind changes nothing
        return Batch(token_ids, embedded, features, torch.from_numpy(counted).to(device))


if __name__ == "__main__":
    main()
