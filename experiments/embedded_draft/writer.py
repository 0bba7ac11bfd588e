"""The target writing many rows at once, each at its own position, its states kept.

Rows lie in slots of one cache, so that a slot whose row is complete takes the next row while the others go on, and each
product has as many rows as there are slots. The states that label a text (`label.py`) are by-products of writing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from teacher import stop_ids
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

TOP_K = 50
"""Sampled text comes from this many tokens at each step."""


class Writer:
    """A Llama with a cache for `num_slots` rows of `length` tokens at most."""

    def __init__(self, teacher: Any, num_slots: int, length: int) -> None:
        config, head = teacher.config, teacher.get_output_embeddings().weight
        self.num_slots, self.length = num_slots, length
        self._model, self._head = teacher.base_model, head.detach()
        self._size = config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, num_slots, config.num_key_value_heads, length, self._size)
        self.device = head.device
        self._keys = torch.zeros(shape, dtype=head.dtype, device=head.device)
        self._values = torch.zeros_like(self._keys)

    @torch.inference_mode()
    def read(self, slots: Sequence[int], starts: Sequence[int], rows: Sequence[Sequence[int]]) -> Tensor:
        """States [rows, tokens, hidden] of as many tokens in each row, from position `starts[i]` of slot `slots[i]` on.

        A slot's earlier positions have been read before.
        """
        device = self._keys.device
        token_ids = torch.tensor(rows, device=device)
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(token_ids.shape[1], device=device)
        every = list(slots) == list(range(self.num_slots))
        places = slice(None) if every else torch.tensor(slots, device=device)
        end = max(starts) + token_ids.shape[1]
        mask = torch.zeros(
            (len(slots), 1, token_ids.shape[1], end), dtype=self._keys.dtype, device=device
        )  # [rows, 1, tokens, end]
        mask.masked_fill_(torch.arange(end, device=device) > positions[:, None, :, None], -torch.inf)
        states = self._model.embed_tokens(token_ids)
        angles = self._model.rotary_emb(states, positions)
        into = torch.tensor(slots, device=device)[:, None]
        for layer, keys, values in zip(self._model.layers, self._keys, self._values, strict=True):
            attention = layer.self_attn
            normed = layer.input_layernorm(states)
            query, key, value = (
                part(normed).unflatten(-1, (-1, self._size)).transpose(1, 2)  # [rows, heads, tokens, size]
                for part in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            query, key = apply_rotary_pos_emb(query, key, *angles)
            keys[into, :, positions] = key.transpose(1, 2)
            values[into, :, positions] = value.transpose(1, 2)
            mixed = F.scaled_dot_product_attention(
                query, keys[places, :, :end], values[places, :, :end], attn_mask=mask, enable_gqa=True
            )
            states = states + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            states = states + layer.mlp(layer.post_attention_layernorm(states))
        result: Tensor = self._model.norm(states)
        return result

    def choose(self, states: Tensor, temperatures: Sequence[float], generator: torch.Generator) -> list[int]:
        """The next token behind each of the states [rows, hidden]; temperature 0: the likeliest."""
        values, token_ids = (states @ self._head.t()).topk(TOP_K, dim=-1)
        hot = torch.tensor(temperatures, device=states.device)[:, None]
        shares = (values.float() / hot.clamp_min(1e-3)).softmax(dim=-1)
        columns = torch.multinomial(shares, 1, generator=generator)
        columns[hot == 0] = 0
        chosen: list[int] = token_ids.gather(1, columns)[:, 0].tolist()
        return chosen


def continue_rows(
    teacher: Any, rows: Sequence[Sequence[int]], *, temperature: float, max_new_tokens: int, seed: int = 0
) -> list[list[int]]:
    """What the target writes behind each row, the token that ends it included. Temperature 0: greedy."""
    writer = Writer(teacher, len(rows), max(map(len, rows)) + max_new_tokens)
    generator, stops = torch.Generator(writer.device).manual_seed(seed), stop_ids(teacher)
    states = torch.stack([writer.read([slot], [0], [row])[0, -1] for slot, row in enumerate(rows)])
    written: list[list[int]] = [[] for _ in rows]
    while True:
        chosen = writer.choose(states, [temperature] * len(rows), generator)
        for tokens, token_id in zip(written, chosen, strict=True):
            if not tokens or (tokens[-1] not in stops and len(tokens) < max_new_tokens):
                tokens.append(token_id)
        if all(tokens[-1] in stops or len(tokens) == max_new_tokens for tokens in written):
            return written
        lengths = [len(row) + len(tokens) - 1 for row, tokens in zip(rows, written, strict=True)]
        states = writer.read(range(len(rows)), lengths, [tokens[-1:] for tokens in written])[:, 0]
