"""A lean forward pass for the Llama and Qwen families: few operators, packed weights.

Query, key and value are one product, gate and up another; residual sums are made inside products; queries and keys are
rotated by one complex product; keys and values are written in place. Rotation, attention and norms compute in float32.
Ranks share heads, cache and weights (`sharding.py`). `decoder_weights.py` makes decoders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from amusd.models.attention import Attention, AttentionInputs
from amusd.models.fused import rotate_and_store, silu_and_multiply
from amusd.models.kv_cache import KVMemory
from amusd.models.linear import Linear
from amusd.models.network import Network
from amusd.models.sharding import Ranks

Norm: TypeAlias = Callable[[Tensor], Tensor]
"""RMS norm of rows, [rows, width] -> [rows, width]; on a CPU it may return a view."""


def norm_on_cpu(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """A `Norm`; `weight` [2 * width]: the norm's weights twice.

    On a CPU `rms_norm` is nine operators; `layer_norm` is one, and is the same for a row joined with its negative.
    """
    width = rows.shape[1]
    mirrored = torch.cat((rows, -rows), dim=1)
    return F.layer_norm(mirrored, (2 * width,), weight, None, epsilon).narrow(1, 0, width)


@dataclass(kw_only=True, eq=False, repr=False)
class Layer:
    """One transformer block, or a rank's share of it."""

    norm: Norm
    query_key_value: Linear
    """Query, key and value heads; rotated pairs are side by side."""
    head_norm: Tensor | None
    """[query heads + key heads, dim] float32; None: there is no such norm."""
    output: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    num_queries: int
    num_keys: int
    dim: int
    """Size of a head."""
    epsilon: float
    ranks: Ranks

    def __call__(
        self, hidden: Tensor, inputs: Tensor, rotation: Tensor, attention: Attention, memory: KVMemory, index: int
    ) -> Tensor:
        """`hidden` [rows, width] plus attention to `inputs` [rows, any] and the MLP; may overwrite `hidden`.

        `inputs`: usually the normed `hidden`; `rotation`: [rows, dim / 2] complex.
        """
        rows = hidden.shape[0]
        query, keys, values = self.place(inputs, rotation, memory, index)
        attended = attention(AttentionInputs(query, keys, values, self.dim**-0.5))
        attended = attended.to(hidden.dtype, memory_format=torch.contiguous_format).reshape(rows, -1)
        hidden = self._add_to(hidden, self.output, attended)
        gate_up = self.gate_up(self.mlp_norm(hidden))
        if gate_up.device.type != "cpu":
            return self._add_to(hidden, self.down, silu_and_multiply(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self._add_to(hidden, self.down, F.silu(gate).mul_(up))

    def _add_to(self, hidden: Tensor, part: Linear, rows: Tensor) -> Tensor:
        """`hidden` plus the product of all ranks' inputs, summed before rounding; may overwrite `hidden`."""
        if self.ranks.size == 1:
            return part.add_to(hidden, rows)
        return (self.ranks.sum(part(rows)) + hidden).to(hidden.dtype)

    def place(self, inputs: Tensor, rotation: Tensor, memory: KVMemory, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Write keys and values of `inputs` [rows, any] into the memory; returns attention's inputs."""
        num_queries, num_keys, dim = self.num_queries, self.num_keys, self.dim
        joint = self.query_key_value(inputs).view(len(inputs), -1, dim)  # query, key and value heads
        if joint.device.type != "cpu":
            storage = memory.joint(index, 2 * num_keys, dim, joint.device)
            query: Tensor = rotate_and_store(
                joint, rotation, self.head_norm, storage, memory.slots_of_pass, num_queries, self.epsilon
            )
            return query, *memory.views(index)
        joint = joint.float()
        rotated = joint[:, : num_queries + num_keys]
        if self.head_norm is not None:
            rotated.copy_(F.rms_norm(rotated, (dim,), None, self.epsilon) * self.head_norm)
        torch.view_as_complex(rotated.view(len(inputs), -1, dim // 2, 2)).mul_(rotation.unsqueeze(1))
        keys, values = memory.update_joint(joint[:, num_queries:], index)
        return joint[:, :num_queries], keys, values


@dataclass(kw_only=True, eq=False, repr=False)
class Decoder(Network):
    """Embedding, layers and head, or a rank's share of them."""

    embedding: Tensor
    """[num_ids, width]."""
    rotation: Tensor
    """[positions, dim / 2] complex64: the turn of each pair of a head."""
    layers: Sequence[Layer]
    norm: Norm
    head: Linear
    ranks: Ranks

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, memory: KVMemory, *, with_logits: bool
    ) -> Tensor:
        """See `Network`."""
        hidden = F.embedding(token_ids, self.embedding)  # [rows, width]
        rotation = self.rotation[positions]  # [rows, dim / 2]
        tapped = () if self.taps is None else self.taps.layers
        states: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in tapped:
                states[index] = hidden.clone()  # a layer may add to it in place
            hidden = layer(hidden, layer.norm(hidden), rotation, attention, memory, index)
        last = len(self.layers)
        if with_logits or last in tapped:
            hidden = self.norm(hidden)
        if self.taps is not None:
            self.taps.write(states | {last: hidden}, memory)
        return self.logits_of(hidden) if with_logits else hidden[:0]

    def logits_of(self, normed: Tensor) -> Tensor:
        """[rows, vocab] for normed rows."""
        return self.ranks.join(self.head(normed))[:, : self.vocab_size]

    def store(self, inputs: Tensor, positions: Tensor, memory: KVMemory) -> None:
        """Write every layer's keys and values of `inputs` [rows, width], used in place of normed rows."""
        inputs, rotation = inputs.to(self.embedding.dtype), self.rotation[positions]
        for index, layer in enumerate(self.layers):
            layer.place(inputs, rotation, memory, index)
