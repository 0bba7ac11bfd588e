"""The file that the embedded draft ships in: matrices as int8 with a scale for each row, norms as they are.

Eight bits a weight are enough to store a draft (`experiments/embedded_draft/` measures what they cost), and half of
what bfloat16 takes. Where the CPU multiplies in int8 the model computes with them (`linear.py`), else with what
`read_draft` gives back in its dtype.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amusd.errors import ConfigError
from amusd.models.linear import to_int8

_FORMAT = "amusd-draft-1"
_OUTPUT_IDS = "output_ids"
_SCALE = ".scale"


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """A draft without the embedding and the head, which it shares with its target."""

    tensors: Mapping[str, Tensor]
    """float32, under the names that `LlamaForCausalLM` gives them."""
    output_ids: Tensor
    """[vocabulary] int64: the tokens it can propose, the most frequent first."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """How it was made, for people: what the model card says."""

    @property
    def num_layers(self) -> int:
        """Layers of the draft."""
        return 1 + max(int(name.split(".")[2]) for name in self.tensors if name.startswith("model.layers."))


def write_draft(path: Path, draft: DraftWeights) -> None:
    """Write a draft, whole or not at all."""
    from safetensors.torch import save_file

    stored: dict[str, Tensor] = {_OUTPUT_IDS: draft.output_ids.to(torch.int32).contiguous()}
    for name, tensor in draft.tensors.items():
        if tensor.ndim == 2:
            stored[name], stored[name + _SCALE] = to_int8(tensor)
        else:
            stored[name] = tensor.float().contiguous()
    partial = path.with_suffix(".partial")
    save_file(stored, partial, metadata={"format": _FORMAT, "facts": json.dumps(dict(draft.facts))})
    partial.chmod(0o644)  # safetensors makes it private
    partial.rename(path)


def digest_of(path: Path) -> str:
    """Hex digest of a file (SHA-256): some 15 ms for the draft that ships."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_draft(path: Path, digest: str | None = None) -> DraftWeights:
    """Read what `write_draft` wrote. Raises `ConfigError` if the file is missing, damaged or another format.

    `digest`: what `digest_of` says of the right file, where that is known.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if digest is not None and digest_of(path) != digest:
            raise ConfigError(f"draft {path}: damaged, its checksum is another; install amusd again to replace it")
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ConfigError(f"draft {path}: not a file of the format {_FORMAT}")
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"draft {path}: {error}") from error
    tensors = {
        name: tensor.float() * stored[name + _SCALE] if name + _SCALE in stored else tensor
        for name, tensor in stored.items()
        if name != _OUTPUT_IDS and not name.endswith(_SCALE)
    }
    return DraftWeights(tensors, stored[_OUTPUT_IDS].long(), json.loads(metadata["facts"]))
