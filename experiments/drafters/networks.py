"""EAGLE-1, EAGLE-3, Medusa and DFlash for training, with the parameter names of published checkpoints.

`predict` returns one `Prediction` for each distance, the nearest first.

References: EAGLE (arXiv:2401.15077), EAGLE-3 (arXiv:2503.01840), Medusa (arXiv:2401.10774), DFlash (arXiv:2602.06036).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

BLOCK_SIZE = 8
"""Tokens of a DFlash block: a known one and seven masks."""
NUM_MEDUSA_HEADS = 4
ANCHORS = 16
"""Number of DFlash blocks drawn from each row of a batch."""


def layer_ids(num_layers: int) -> list[int]:
    """Indices into `hidden_states` of the layers that are read; EAGLE-1 and Medusa read the last alone."""
    return [2, num_layers // 2, num_layers - 3, num_layers]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of text with the target's states."""

    token_ids: Tensor
    """int64 [rows, width]."""
    embedded: Tensor
    """float32 [rows, width, hidden]: the target's embedding of the tokens."""
    features: Tensor
    """bfloat16 [rows, width, layers, hidden], as in `layer_ids`."""
    counted: Tensor
    """bool [rows, width]: positions whose next token belongs to an answer."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A network's predictions of the token behind some positions."""

    states: Tensor
    """[predictions, hidden]; the output head makes them logits."""
    positions: Tensor
    """int64 [predictions]: row * width + position; the target's state there predicts the same token."""


class Attention(nn.Module):
    """Multi-head attention with rotary positions and as many key heads as query heads."""

    def __init__(self, config: Any, input_size: int, *, normed: bool = False) -> None:
        super().__init__()
        hidden, self._heads = config.hidden_size, config.num_attention_heads
        self.q_proj = nn.Linear(input_size, hidden, bias=False)
        self.k_proj = nn.Linear(input_size, hidden, bias=False)
        self.v_proj = nn.Linear(input_size, hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        if normed:  # Qwen3's
            self.q_norm = nn.RMSNorm(hidden // self._heads, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(hidden // self._heads, eps=config.rms_norm_eps)
        self._normed = normed

    def query(self, states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[rows, heads, tokens, head width], scaled for a plain dot product."""
        query = self._split(self.q_proj(states))
        query = self.q_norm(query.float()) if self._normed else query
        return rotate(query, rotary) * query.shape[-1] ** -0.5

    def key(self, states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[rows, heads, tokens, head width]."""
        key = self._split(self.k_proj(states))
        return rotate(self.k_norm(key.float()) if self._normed else key, rotary)

    def value(self, states: Tensor) -> Tensor:
        """[rows, heads, tokens, head width]."""
        return self._split(self.v_proj(states))

    def output(self, mixed: Tensor) -> Tensor:
        """[rows, heads, tokens, head width] -> [rows, tokens, hidden]."""
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (self._heads, -1)).transpose(1, 2)


class MLP(nn.Module):
    """The gated feed-forward block of a Llama."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))
        return out


def rotary_table(config: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., tokens, head width] of the positions [..., tokens]."""
    width = config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters["rope_theta"]
    frequencies = theta ** (-torch.arange(0, width, 2, device=positions.device) / width)
    angles = (positions.unsqueeze(-1) * frequencies).repeat_interleave(2, dim=-1)
    angles = torch.cat((angles[..., ::2], angles[..., 1::2]), dim=-1)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding, in halves as Llama has it."""
    first, second = heads.chunk(2, dim=-1)
    cos, sin = rotary
    return (heads * cos + torch.cat((-second, first), dim=-1) * sin).to(heads.dtype)


class _Eagle(nn.Module):
    """A layer that reads a token and the feature before it, and goes on with its own output.

    Row r holds token r + 1 and the feature of position r. In step k the features of the last k rows before it are the
    network's own: row r sees keys of step 0 up to row r - k, and one key of each later step.
    """

    def __init__(self, config: Any, attention_size: int) -> None:
        super().__init__()
        self._config = config
        layer = nn.Module()
        layer.self_attn = Attention(config, attention_size)
        layer.mlp = MLP(config)
        layer.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._layer = (layer,)  # the subclass names it

    def fuse(self, features: Tensor) -> Tensor:
        """The network's features: [rows, width, layers, hidden] -> [rows, width, hidden]."""
        raise NotImplementedError

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def read(self, states: Tensor) -> Tensor:
        raise NotImplementedError

    def unroll(self, batch: Batch, steps: int) -> list[Tensor]:
        """Output states [rows, width - 1, hidden] of every step."""
        (layer,) = self._layer
        attention: Attention = layer.self_attn
        embedded, hidden = batch.embedded[:, 1:], self.fuse(batch.features[:, :-1])
        rotary = rotary_table(self._config, torch.arange(embedded.shape[1], device=embedded.device))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs = []
        for _ in range(steps):
            residual, inputs = self.inputs(embedded, hidden)
            keys.append(attention.key(inputs, rotary))
            values.append(attention.value(inputs))
            residual = residual + attention.output(attend(attention.query(inputs, rotary), keys, values))
            states = residual + layer.mlp(layer.post_attention_layernorm(residual))
            outputs.append(states)
            hidden = behind(states, 1)
        return outputs

    def predict(self, batch: Batch, steps: int) -> list[Prediction]:
        counted = batch.counted[:, 1:].clone()
        counted[:, :steps] = False
        row, place = counted.nonzero(as_tuple=True)
        positions = row * batch.token_ids.shape[1] + place + 1
        return [Prediction(self.read(states[row, place]), positions) for states in self.unroll(batch, steps)]


def behind(states: Tensor, rows: int) -> Tensor:
    """Shift [..., rows, width] by so many rows to the end; zeros fill the beginning."""
    return F.pad(states, (0, 0, rows, 0))[..., : states.shape[-2], :] if rows else states


def attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of the last step over all steps, [rows, heads, tokens, head width]."""
    last, width = len(keys) - 1, query.shape[-2]
    hidden = torch.ones(width, width, dtype=torch.bool, device=query.device).triu(1 - last)
    scores = [(query @ keys[0].transpose(-1, -2)).masked_fill(hidden, float("-inf"))]
    scores += [(query * behind(keys[step], last - step)).sum(-1, keepdim=True) for step in range(1, last + 1)]
    weights = torch.cat(scores, dim=-1).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    mixed = weights[..., :width] @ values[0]
    for step in range(1, last + 1):
        mixed = mixed + weights[..., width + step - 1 : width + step] * behind(values[step], last - step)
    return mixed


class Eagle3(_Eagle):
    """EAGLE-3: features are three layers of the target, fused; beyond them the layer's own output states."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, 2 * config.hidden_size)
        hidden = config.hidden_size
        (self.midlayer,) = self._layer
        self.midlayer.hidden_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.midlayer.input_layernorm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)

    def start_from(self, teacher: Any, sizes: Tensor) -> None:
        """Begin with features of like size, flat logits and attention to the row's own token."""
        temper(self.norm, teacher)
        see_own_token(self.midlayer.self_attn, self.fc.out_features)
        blend(self.fc, sizes[:3])

    def fuse(self, features: Tensor) -> Tensor:
        """As in `_Eagle`."""
        fused: Tensor = self.fc(features[:, :, :3].flatten(2))
        return fused.float()

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As in `_Eagle`."""
        layer = self.midlayer
        return hidden, torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), dim=-1)

    def read(self, states: Tensor) -> Tensor:
        """As in `_Eagle`."""
        normed: Tensor = self.norm(states)
        return normed


class Eagle1(_Eagle):
    """EAGLE-1: features are the target's last states, and so are what the layer gives."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, config.hidden_size)
        self.layers = nn.ModuleList(self._layer)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def start_from(self, teacher: Any, sizes: Tensor) -> None:
        """Begin with tokens and features of like size."""
        tokens = teacher.get_input_embeddings().weight.float().square().mean().sqrt()
        blend(self.fc, torch.stack((tokens, sizes[3])))

    def fuse(self, features: Tensor) -> Tensor:
        """As in `_Eagle`."""
        return features[:, :, 3].float()

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As in `_Eagle`."""
        fused: Tensor = self.fc(torch.cat((embedded, hidden), dim=-1))
        return fused.float(), fused

    def read(self, states: Tensor) -> Tensor:
        """As in `_Eagle`."""
        return states


class Medusa(nn.ModuleList):
    """Heads that each read the target's last state, one residual block each: head i predicts the token i + 2 on."""

    def __init__(self, config: Any) -> None:
        super().__init__(nn.ModuleList([nn.Module()]) for _ in range(NUM_MEDUSA_HEADS))
        for head in self:
            head[0].linear = nn.Linear(config.hidden_size, config.hidden_size)
            nn.init.zeros_(head[0].linear.weight)
            nn.init.zeros_(head[0].linear.bias)

    def start_from(self, teacher: Any, sizes: Tensor) -> None:
        """Begin as the target's own head, which a block of zeros already is."""

    def predict(self, batch: Batch, steps: int) -> list[Prediction]:
        """One prediction for each head, `steps` of them at most."""
        last, width = batch.features[:, :, 3].float(), batch.token_ids.shape[1]
        predictions = []
        for ahead, head in enumerate(list(self)[:steps], start=1):
            row, place = batch.counted[:, ahead:].nonzero(as_tuple=True)
            states = last[row, place]
            states = states + F.silu(head[0].linear(states))
            predictions.append(Prediction(states, row * width + place + ahead))
        return predictions


class DFlash(nn.Module):
    """DFlash: layers that fill a block of masks at once, reading the target's features as keys and values."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._config = config
        self.mask_embedding = torch.zeros(hidden)  # the caller sets the target's row of the mask token
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.layers = nn.ModuleList()
        for _ in range(config.num_hidden_layers):
            layer = nn.Module()
            layer.self_attn = Attention(config, hidden, normed=True)
            layer.mlp = MLP(config)
            layer.input_layernorm = nn.RMSNorm(hidden, eps=eps)
            layer.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
            self.layers.append(layer)

    def start_from(self, teacher: Any, sizes: Tensor) -> None:
        """Begin with features of like size and flat logits."""
        temper(self.norm, teacher)
        blend(self.fc, sizes[:3])

    def predict(self, batch: Batch, steps: int) -> list[Prediction]:
        """One prediction for each mask, `steps` of them at most, of blocks that begin at random counted tokens."""
        rows, width = batch.token_ids.shape
        device = batch.token_ids.device
        # A block begins at a token that is known, whose own feature is not, and ends within the row.
        weights = batch.counted[:, : width - BLOCK_SIZE].float() + 1e-6
        anchors = torch.multinomial(weights, min(ANCHORS, weights.shape[1])).sort(dim=1).values  # [rows, blocks]
        positions = anchors.unsqueeze(-1) + torch.arange(BLOCK_SIZE, device=device)  # [rows, blocks, BLOCK_SIZE]
        row = torch.arange(rows, device=device)[:, None, None]
        embedded = self.mask_embedding.expand(*positions.shape, -1).clone()
        embedded[:, :, 0] = batch.embedded[row[:, :, 0], anchors]
        states = self.blocks(batch.features, anchors, embedded)
        predictions = []
        for ahead in range(1, min(steps, BLOCK_SIZE - 1) + 1):
            chosen = batch.counted[row[:, :, 0], anchors + ahead - 1]
            flat = (row[:, :, 0] * width + anchors + ahead - 1)[chosen]
            predictions.append(Prediction(self.norm(states[:, :, ahead][chosen]), flat))
        return predictions

    def blocks(self, features: Tensor, anchors: Tensor, embedded: Tensor) -> Tensor:
        """Output states of blocks [rows, blocks, BLOCK_SIZE, hidden] that see the features before their anchors."""
        width, blocks = features.shape[1], anchors.shape[1]
        context = self.hidden_norm(self.fc(features[:, :, :3].flatten(2)).float())  # [rows, width, hidden]
        table = rotary_table(self._config, torch.arange(width + BLOCK_SIZE, device=features.device))
        seen = (table[0][:width], table[1][:width])
        positions = anchors.unsqueeze(-1) + torch.arange(BLOCK_SIZE, device=features.device)
        own = tuple(part[positions].flatten(1, 2).unsqueeze(1) for part in table)  # [rows, 1, blocks * BLOCK_SIZE, ...]
        unseen = torch.arange(width, device=features.device) >= anchors.unsqueeze(-1)  # [rows, blocks, width]
        unseen = unseen.repeat_interleave(BLOCK_SIZE, dim=1).unsqueeze(1)
        states = embedded.flatten(1, 2)
        for layer in self.layers:
            attention: Attention = layer.self_attn
            inputs = layer.input_layernorm(states)
            query = attention.query(inputs, own)
            far = (query @ attention.key(context, seen).transpose(-1, -2)).masked_fill(unseen, float("-inf"))
            split = (blocks, BLOCK_SIZE)
            key, value = (part.unflatten(2, split) for part in (attention.key(inputs, own), attention.value(inputs)))
            near = (query.unflatten(2, split) @ key.transpose(-1, -2)).flatten(2, 3)
            weights = torch.cat((far, near), dim=-1).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
            mixed = weights[..., :width] @ attention.value(context)
            mixed = mixed + (weights[..., width:].unflatten(2, split) @ value).flatten(2, 3)
            states = states + attention.output(mixed)
            states = states + layer.mlp(layer.post_attention_layernorm(states))
        return states.unflatten(1, (blocks, BLOCK_SIZE))


@torch.no_grad()
def see_own_token(attention: Attention, size: int) -> None:
    """Let half of the heads begin by reading their own token, from the first `size` inputs.

    Under even weights the token would be one of hundreds. Sharing query and key weights makes a row's own key fit best.
    """
    heads = attention.q_proj.out_features // 2
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight.normal_(std=0.02)
        projection.weight[:heads, size:] *= 0.1
    attention.q_proj.weight[:heads, :size].normal_(std=0.042)
    attention.k_proj.weight[:heads, :size] = attention.q_proj.weight[:heads, :size]
    attention.v_proj.weight[:, :size].normal_(std=0.04)
    attention.o_proj.weight.normal_(std=attention.o_proj.in_features**-0.5)


@torch.no_grad()
def blend(projection: nn.Linear, sizes: Tensor) -> None:
    """Weigh inputs side by side by their root mean squares `sizes`, so that none drowns the others at first."""
    width = projection.in_features // len(sizes)
    for part, size in zip(projection.weight.split(width, dim=1), sizes, strict=True):
        part.normal_(std=0.5 / (float(size) * width**0.5))


@torch.no_grad()
def temper(norm: nn.RMSNorm, teacher: Any) -> None:
    """Take a quarter of the target's final norm: random states would else make sharp logits, slow to unlearn."""
    norm.weight.copy_(0.25 * teacher.base_model.norm.weight)
