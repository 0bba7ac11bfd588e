"""Recurrent layers of transformers' models, called for each sequence alone, with its own states."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

_UPDATES = frozenset({"update_conv_state", "update_recurrent_state"})
_CACHES = ("cache_params", "past_key_values")
_SETTINGS = ("chunk_size", "time_step_limit")
"""Attributes of layers that change passes of several rows, but not of one."""
_CHUNK = 16
"""Rows to which transformers' fallbacks pad a decoding pass, instead of 64 or 256."""


def is_recurrent_layer(kind: type[Any]) -> bool:
    """Whether modules of this class keep a state in a cache: `forward` names a method of `_UPDATES`."""
    code = getattr(inspect.unwrap(getattr(kind, "forward", None) or (lambda: None)), "__code__", None)
    return code is not None and bool(_UPDATES & {*code.co_names})


def has_recurrent_layers(model_class: type[Any]) -> bool:
    """Whether a model's recurrent layers can be called with other states: layers and model take a cache."""
    takes_cache = "past_key_values" in inspect.signature(model_class.forward).parameters
    names = vars(sys.modules[model_class.__module__]).values()
    layers = [each for each in names if isinstance(each, type) and is_recurrent_layer(each)]
    return takes_cache and bool(layers) and all(map(_cache_of, layers))


def _cache_of(layer: type[Any]) -> str | None:
    """The optional argument by which layers of this class get a cache; None: there is none."""
    parameters = inspect.signature(layer.forward).parameters
    return next((name for name in _CACHES if name in parameters and parameters[name].default is None), None)


class RecurrentLayers:
    """The recurrent layers of one model, changed to read and write the states in the `parts` of the cache."""

    def __init__(self, model: Any) -> None:
        self.layers = [module for module in model.modules() if is_recurrent_layer(type(module))]
        self.most_rows: int | None = None
        """Most rows of a call; None: any number."""
        self._in_prompts = [
            (layer, name, getattr(layer, name)) for layer in self.layers for name in _SETTINGS if hasattr(layer, name)
        ]
        for layer in self.layers:
            names, cache = inspect.signature(layer.forward).parameters, _cache_of(type(layer))
            assert cache is not None, "see has_recurrent_layers"
            # Some layers pass arguments on: on a CPU to fallbacks that pad, on a GPU perhaps to strict libraries.
            is_short = "kwargs" in names and not hasattr(layer, _SETTINGS[0]) and model.device.type == "cpu"
            more = {_SETTINGS[0]: _CHUNK} if is_short else {}
            layer.forward = partial(self._forward, layer, layer.forward, cache, more)

    def begin(self, *, is_prompt: bool) -> None:
        """Make the next pass compute as transformers does for a prompt, or for single tokens."""
        self._is_prompt = is_prompt
        for layer, name, value in self._in_prompts:
            decoding: Any = min(value, _CHUNK) if name == _SETTINGS[0] else (0.0, math.inf)
            setattr(layer, name, value if is_prompt else decoding)

    def _forward(
        self, layer: Any, forward: Any, cache: str, more: Mapping[str, int], hidden_states: Tensor, **given: Any
    ) -> Tensor:
        """Compute [1, rows, hidden], the rows of each sequence after its own state."""
        number, found = layer.layer_idx, []
        for part in given[cache].parts:
            own = part.state.setdefault(number, LinearAttentionLayer())
            for rows in part.pieces(number, self.most_rows):
                states = {cache: Cache(layers=[own] * (number + 1))}
                found.append(forward(hidden_states[:, rows], **states, **({} if self._is_prompt else more)))
        return torch.cat(found, dim=1)
