"""The draft while it is trained: a Llama of few layers between the target's embedding and rows of its head."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import AttentionInterface, LlamaModel


class Student(nn.Module):
    """Maps tokens to states that the target's output head reads. Embedding and head belong to the target: frozen."""

    def __init__(self, teacher: Any, layers: Sequence[int | None]) -> None:
        """`layers`: the layer of the target from which each layer of the draft starts; None: random weights."""
        super().__init__()
        config = copy.deepcopy(teacher.config)
        config.num_hidden_layers = len(layers)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: len(layers)]
        embedding = teacher.get_input_embeddings()
        self.model = LlamaModel(config)
        if teacher.device.type == "cpu":
            self.model.set_attn_implementation(ATTENTION)
        self.model.embed_tokens = nn.Embedding(1, 1)  # replaced by the caller's rows
        self.embedding = embedding.weight.detach()
        for layer, start in zip(self.model.layers, layers, strict=True):
            if start is not None:
                layer.load_state_dict(teacher.base_model.layers[start].state_dict())
        self.model.norm.load_state_dict(teacher.base_model.norm.state_dict())
        self.model.embed_tokens.requires_grad_(False)
        self.to(self.embedding.device)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[batch, tokens] -> states [batch, tokens, hidden] behind the final norm."""
        embedded = nn.functional.embedding(token_ids, self.embedding).float()
        states: Tensor = self.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return states

    def load_trained_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from the `trained_weights` of a draft with as many layers."""
        with torch.no_grad():
            for name, tensor in self.trained_weights().items():
                tensor.copy_(tensors[name])

    def trained_weights(self) -> dict[str, Tensor]:
        """The weights that the draft does not share with the target, by their names in `LlamaForCausalLM`."""
        return {
            f"model.{name}": tensor
            for name, tensor in self.model.state_dict().items()
            if not name.startswith("embed_tokens")
        }


ATTENTION = "amusd_products"


def attend(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention by whole matrix products; on a CPU torch's own takes twice as long, by its backward pass.

    query [batch, heads, tokens, size], key and value [batch, groups, tokens, size] -> [batch, tokens, heads, size].
    """
    batch, heads, tokens, size = query.shape
    groups = key.shape[1]
    grouped = (query * scaling).reshape(batch * groups, -1, size)
    scores = torch.bmm(grouped, key.reshape(batch * groups, tokens, size).transpose(1, 2))
    future = torch.full((tokens, tokens), -torch.inf, dtype=scores.dtype, device=scores.device).triu(1)
    shares = F.softmax(scores.view(batch, heads, tokens, tokens) + future, dim=-1)
    mixed = torch.bmm(
        shares.view(batch * groups, -1, tokens).to(value.dtype), value.reshape(batch * groups, tokens, size)
    )
    return mixed.view(batch, heads, tokens, size).transpose(1, 2), None


AttentionInterface.register(ATTENTION, attend)
