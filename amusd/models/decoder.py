"""A lean forward pass for Llama, Mistral, Qwen2 and Qwen3: few operators, packed weights.

Query, key and value are one product, gate and up another. Products add the residual. One complex product rotates
queries and keys. Keys and values are written in place. Rotation, attention and norms compute in float32. Ranks split
heads, cache and weights (`sharding.py`). `decoder_weights.py` makes decoders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from amusd.models.attention import Attention, AttentionInputs, Window
from amusd.models.fused import add_parts, rotate_and_store, silu_and_multiply
from amusd.models.kv_cache import PassMemory
from amusd.models.linear import Linear
from amusd.models.network import Network
from amusd.models.sharding import Ranks

Norm: TypeAlias = Callable[..., Tensor]
"""RMS norm of rows: `norm(hidden)`, or `norm(hidden, parts)`, which first adds `parts` to `hidden` (`add_parts`).

[rows, width] -> [rows, width], on a CPU perhaps not contiguous.
"""


def norm_on_cpu(hidden: Tensor, parts: Tensor | None = None, /, *, weight: Tensor, epsilon: float) -> Tensor:
    """A `Norm`; `weight` [2 * width]: the norm's weights twice.

    On a CPU `rms_norm` is nine operators; `layer_norm` is one, and is the same for a row joined with its negative.
    """
    if parts is not None:
        add_parts(hidden, parts)
    width = hidden.shape[1]
    mirrored = torch.cat((hidden, -hidden), dim=1)
    return F.layer_norm(mirrored, (2 * width,), weight, None, epsilon).narrow(1, 0, width)


@dataclass(kw_only=True, eq=False, repr=False)
class Layer:
    """One transformer block, or a rank's share of it."""

    index: int
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
    window: Window | None

    def __call__(
        self,
        hidden: Tensor,
        inputs: Tensor,
        rotation: Tensor,
        attention: Attention,
        memory: PassMemory,
        next_norm: Norm,
    ) -> tuple[Tensor, Tensor]:
        """The block's output [rows, width] for `hidden` of the same shape, and the output's `next_norm`.

        May overwrite `hidden`. With several ranks, only the rows `Ranks.own_rows` of the output are summed. `inputs`:
        usually the normed `hidden`; `rotation`: [rows, dim / 2] complex.
        """
        rows = hidden.shape[0]
        query, keys, values = self.place(inputs, rotation, memory)
        attended = attention(AttentionInputs(query, keys, values, self.dim**-0.5, window=self.window))
        attended = attended.to(hidden.dtype, memory_format=torch.contiguous_format).reshape(rows, -1)
        hidden, normed = self._add(hidden, self.output, attended, self.mlp_norm)
        gate_up = self.gate_up(normed)
        if gate_up.device.type != "cpu":
            return self._add(hidden, self.down, silu_and_multiply(gate_up), next_norm)
        gate, up = gate_up.chunk(2, dim=-1)
        return self._add(hidden, self.down, F.silu(gate).mul_(up), next_norm)

    def _add(self, hidden: Tensor, linear: Linear, rows: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """`hidden` plus the sum of all ranks' products, and the norm of the result."""
        ranks, num_rows = self.ranks, len(hidden)
        if ranks.size == 1:
            hidden = linear.add_to(hidden, rows)
            return hidden, norm(hidden)
        normed = norm(hidden[ranks.own_rows(num_rows)], ranks.parts(linear(rows)))
        return hidden, ranks.whole(normed, num_rows)

    def place(self, inputs: Tensor, rotation: Tensor, memory: PassMemory) -> tuple[Tensor, Tensor, Tensor]:
        """Write keys and values of `inputs` [rows, any] into the memory; returns query, keys and values."""
        num_queries, num_keys, dim = self.num_queries, self.num_keys, self.dim
        joint = self.query_key_value(inputs).view(len(inputs), -1, dim)  # query, key and value heads
        if joint.device.type != "cpu":
            storage = memory.shared.joint(self.index, 2 * num_keys, dim, joint.device)
            query: Tensor = rotate_and_store(
                joint, rotation, self.head_norm, storage, memory.slots, num_queries, self.epsilon
            )
            return query, *memory.shared.views(self.index)
        joint = joint.float()
        rotated = joint[:, : num_queries + num_keys]
        if self.head_norm is not None:
            rotated.copy_(F.rms_norm(rotated, (dim,), None, self.epsilon) * self.head_norm)
        torch.view_as_complex(rotated.view(len(inputs), -1, dim // 2, 2)).mul_(rotation.unsqueeze(1))
        keys, values = memory.update_joint(joint[:, num_queries:], self.index)
        return joint[:, :num_queries], keys, values


@dataclass(kw_only=True, eq=False, repr=False)
class Decoder(Network):
    """Embedding, layers and head, or a rank's share of them."""

    embedding: Tensor
    """[num_ids, width]."""
    rotation: Tensor
    """[positions, dim / 2] complex64: the turn of each pair of a head."""
    layers: Sequence[Layer]
    norms: Sequence[Norm]
    """The norm of each layer's inputs, then of the head's."""
    head: Linear
    ranks: Ranks

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, memory: PassMemory, *, with_logits: bool
    ) -> Tensor:
        """See `Network`."""
        hidden = F.embedding(token_ids, self.embedding)  # [rows, width]
        _, normed = self._run_layers(hidden, self.norms[0](hidden), positions, attention, memory)
        return self.logits_of(normed) if with_logits else normed[:0]

    def _run_layers(
        self, hidden: Tensor, normed: Tensor, positions: Tensor, attention: Attention, memory: PassMemory
    ) -> tuple[Tensor, Tensor]:
        """The last layer's output and its norm, both [rows, width]. `normed` [rows, any]: the first layer's inputs."""
        rotation = self.rotation[positions]  # [rows, dim / 2]
        tapped = () if self.taps is None else self.taps.layers
        own, states = self.ranks.own_rows(len(hidden)), dict[int, Tensor]()
        for layer in self.layers:
            if layer.index in tapped:
                # a copy: the layer may overwrite `hidden`
                states[layer.index] = self.ranks.whole(hidden[own].clone(), len(hidden))
            hidden, normed = layer(hidden, normed, rotation, attention, memory, self.norms[layer.index + 1])
        if self.taps is not None:
            self.taps.write(states | {len(self.layers): normed}, memory)
        return hidden, normed

    def logits_of(self, normed: Tensor) -> Tensor:
        """[rows, vocab] for normed rows."""
        return self.ranks.join(self.head(normed))[:, : self.vocab_size]

    def store(self, inputs: Tensor, positions: Tensor, memory: PassMemory) -> None:
        """Write the keys and values that every layer makes of `inputs` [rows, width] instead of normed rows."""
        inputs, rotation = inputs.to(self.embedding.dtype), self.rotation[positions]
        for layer in self.layers:
            layer.place(inputs, rotation, memory)
