"""A lean forward pass for the Llama and Qwen families: few operators, packed weights.

Query, key and value are one product, gate and up another; residual sums are made inside products; queries and keys are
rotated by one complex product; keys and values are written in place. Rotation, attention and norms compute in float32.
Ranks share heads, cache and weights (`sharding.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from amusd.errors import ConfigError
from amusd.models.attention import Attention, AttentionInputs
from amusd.models.checkpoint import CONFIG
from amusd.models.configuration import ModelConfig
from amusd.models.features import FeatureTaps
from amusd.models.fused import rotate_and_store, silu_and_multiply
from amusd.models.kv_cache import KVMemory
from amusd.models.linear import INT8, Linear, Weights, multiplies_fp16
from amusd.models.load_options import LoadOptions, loaded_dtype
from amusd.models.sharding import Ranks, share, share_of_outputs
from amusd.models.vocabulary import EMBEDDING, HEAD

_VECTOR = 32
"""Most numbers in a CPU's vector: bfloat16 in 64 bytes."""


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of a `ModelConfig` model, without biases."""
    width, units, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    block: dict[str, tuple[int, ...]] = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (units, width),
        "mlp.up_proj": (units, width),
        "mlp.down_proj": (width, units),
    }
    if config.model_type == "qwen3":
        block |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
    layers, ends = range(config.num_hidden_layers), (config.vocab_size, width)
    inner = {f"model.layers.{index}.{name}.weight": shape for index in layers for name, shape in block.items()}
    return {EMBEDDING: ends, **inner, "model.norm.weight": (width,), HEAD: ends}


def fit_weights(
    owner: str, given: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, all_given: bool = False
) -> dict[str, Tensor]:
    """The weights that `shapes` names, and their biases.

    Raises `ConfigError` if one is missing or misshaped, or with `all_given` if one is left over.
    """
    biases = {name.removesuffix("weight") + "bias": shape[:1] for name, shape in shapes.items() if len(shape) > 1}
    wanted = {**shapes, **{name: shape for name, shape in biases.items() if name in given}}
    if missing := wanted.keys() - given.keys():
        raise ConfigError(f"{owner}: lacks weights, {min(missing)} among them")
    if all_given and (extra := given.keys() - wanted.keys()):
        raise ConfigError(f"{owner}: its file has weights without a place, {min(extra)} among them")
    for name, shape in wanted.items():
        if given[name].shape != shape:
            found = list(given[name].shape)
            raise ConfigError(f"{owner}: {name} has shape {found}, and {CONFIG} asks for {list(shape)}")
    return {name: given[name] for name in wanted}


class _Layer:
    """One transformer block, or a rank's share of it."""

    def __init__(self, weights: dict[str, Tensor], config: ModelConfig, options: LoadOptions) -> None:
        device, dtype, ranks = torch.device(options.device), loaded_dtype(options.dtype), options.ranks
        self._dim, self._epsilon, self._ranks = config.head_dim, config.rms_norm_eps, ranks
        queries, keys = _heads(config, ranks)
        self._num_queries, self._num_keys = len(queries), len(keys)
        self.normed = Norm(weights.get("input_layernorm.weight"), self._epsilon, device, dtype)
        self._mlp_norm = Norm(weights["post_attention_layernorm.weight"], self._epsilon, device, dtype)
        query, key, value, output = (Weights.pop(weights, f"self_attn.{name}_proj") for name in "qkvo")
        gate, up, down = (Weights.pop(weights, f"mlp.{name}_proj") for name in ("gate", "up", "down"))
        pairs, units = _pairs_side_by_side(self._dim), _slots(share(len(gate.matrix), ranks), 1)
        orders = _reorder(pairs, queries), _reorder(pairs, keys), _slots(keys, self._dim)
        self.query_key_value = _fuse([query, key, value], orders, options)
        self.output = _split_inputs(output, _slots(queries, self._dim), options)
        self.gate_up = _fuse([gate, up], [units, units], options)
        self.down = _split_inputs(down, units, options)
        self._head_norm: Tensor | None = None
        """[query heads + key heads, dim] float32: norm weights of each head."""
        if "self_attn.q_norm.weight" in weights:
            of_query, of_key = (weights[f"self_attn.{name}_norm.weight"].float()[pairs] for name in "qk")
            expanded = of_query.expand(len(queries), -1), of_key.expand(len(keys), -1)
            self._head_norm = torch.cat(expanded).to(device)

    def __call__(
        self, hidden: Tensor, inputs: Tensor, rotation: Tensor, attention: Attention, memory: KVMemory, index: int
    ) -> Tensor:
        """`hidden` [rows, width] plus attention to `inputs` [rows, any] and the MLP; may overwrite `hidden`.

        `inputs`: usually the normed `hidden`; `rotation`: [rows, dim / 2] complex.
        """
        rows = hidden.shape[0]
        query, keys, values = self.place(inputs, rotation, memory, index)
        attended = attention(AttentionInputs(query, keys, values, self._dim**-0.5))
        attended = attended.to(hidden.dtype, memory_format=torch.contiguous_format).reshape(rows, -1)
        hidden = self._add_to(hidden, self.output, attended)
        gate_up = self.gate_up(self._mlp_norm(hidden))
        if gate_up.device.type != "cpu":
            return self._add_to(hidden, self.down, silu_and_multiply(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self._add_to(hidden, self.down, F.silu(gate).mul_(up))

    def _add_to(self, hidden: Tensor, part: Linear, rows: Tensor) -> Tensor:
        """`hidden` plus the product of all ranks' inputs, summed before rounding; may overwrite `hidden`."""
        if self._ranks.size == 1:
            return part.add_to(hidden, rows)
        return (self._ranks.sum(part(rows)) + hidden).to(hidden.dtype)

    def place(self, inputs: Tensor, rotation: Tensor, memory: KVMemory, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Write keys and values of `inputs` [rows, any] into the memory; returns attention's inputs."""
        num_queries, num_keys, dim = self._num_queries, self._num_keys, self._dim
        joint = self.query_key_value(inputs).view(len(inputs), -1, dim)  # query, key and value heads
        if joint.device.type != "cpu":
            storage = memory.joint(index, 2 * num_keys, dim, joint.device)
            places = memory.slots_of_pass, num_queries, self._epsilon
            query: Tensor = rotate_and_store(joint, rotation, self._head_norm, storage, *places)
            return query, *memory.views(index)
        joint = joint.float()
        rotated = joint[:, : num_queries + num_keys]
        if self._head_norm is not None:
            rotated.copy_(F.rms_norm(rotated, (dim,), None, self._epsilon) * self._head_norm)
        torch.view_as_complex(rotated.view(len(inputs), -1, dim // 2, 2)).mul_(rotation.unsqueeze(1))
        keys, values = memory.update_joint(joint[:, num_queries:], index)
        return joint[:, :num_queries], keys, values


class Decoder:
    """A `Network` made of the weights of a model of `ModelConfig`."""

    implementation = "amusd"
    feature_width = 0
    """Width of the feature that each row reads (`KVMemory.parents_of_pass`); 0: none."""

    def __init__(
        self, weights: dict[str, Tensor], config: ModelConfig, options: LoadOptions, max_positions: int
    ) -> None:
        """`weights`: by the names of `weight_shapes`; removed one by one as they are taken in.

        `max_positions`: rows of the rotary table.
        """
        device, ranks, int8 = torch.device(options.device), options.ranks, options.dtype == INT8
        rows = loaded_dtype(options.dtype)
        stored = rows.itemsize
        if multiplies_fp16(device, rows):
            stored = 1 if int8 else min(stored, weights[EMBEDDING].itemsize)
        read = (tensor.numel() for name, tensor in weights.items() if name != EMBEDDING)
        self.weight_bytes = sum(read) * stored // ranks.size
        """Bytes of weights that one pass reads, with the head and without the embedding."""
        self.device = device
        self.attention_shape: tuple[int, int, int] | None = None
        """Query heads, key heads and their size, if every width is a multiple of the CPU's vector.

        None: the rest of a width may be computed by other instructions.
        """
        if not any(width % _VECTOR for width in (config.hidden_size, config.intermediate_size, config.head_dim)):
            queries, keys = _heads(config, ranks)
            self.attention_shape = len(queries), len(keys), config.head_dim
        self._rotation = _rotary_table(config, max_positions).to(device)
        self._layers: list[_Layer] = []
        for index in range(config.num_hidden_layers):
            prefix = f"model.layers.{index}."
            names = [name for name in weights if name.startswith(prefix)]
            block = {name.removeprefix(prefix): weights.pop(name) for name in names}
            self._layers.append(_Layer(block, config, options))
        embedding, head = weights.pop(EMBEDDING), Weights.pop(weights, "lm_head")
        is_tied = head.matrix is embedding
        self._norm = Norm(weights.pop("model.norm.weight", None), config.rms_norm_eps, device, rows)
        self._embedding = embedding.to(device, rows, copy=True)
        del embedding
        if is_tied and not multiplies_fp16(device, rows):  # whose weights are a copy in any case
            head = replace(head, matrix=self._embedding)
        self.num_ids, self.vocab_size = len(self._embedding), len(head.matrix)
        """Token ids that it takes in, `[0, num_ids)`, and scores; a reduced head scores fewer."""
        self._ranks = ranks
        self._head = options.linear(head.each(partial(share_of_outputs, ranks=ranks)), copy=not is_tied)
        self.cache_dtype = torch.float32 if device.type == "cpu" else rows
        self.taps = FeatureTaps(options.features, device, rows) if options.features else None
        """Write features for drafters; None: no drafter reads any."""

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, memory: KVMemory, *, with_logits: bool
    ) -> Tensor | None:
        """Logits [rows, vocab] of `token_ids` [rows]; None without `with_logits`.

        `positions` [rows]: of the model; `attention`: what rows see; `memory`: where they are written
        (`slots_of_pass`).
        """
        hidden = F.embedding(token_ids, self._embedding)  # [rows, width]
        rotation = self._rotation[positions]  # [rows, dim / 2]
        tapped = () if self.taps is None else self.taps.layers
        states: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            if index in tapped:
                states[index] = hidden.clone()  # a layer may add to it in place
            hidden = layer(hidden, layer.normed(hidden), rotation, attention, memory, index)
        last = len(self._layers)
        if with_logits or last in tapped:
            hidden = self._norm(hidden)
        if self.taps is not None:
            self.taps.write(states | {last: hidden}, memory)
        return self._logits(hidden) if with_logits else None

    def _logits(self, normed: Tensor) -> Tensor:
        return self._ranks.join(self._head(normed))[:, : self.vocab_size]

    def store(self, inputs: Tensor, positions: Tensor, memory: KVMemory) -> None:
        """Write every layer's keys and values of `inputs` [rows, width], used in place of normed rows."""
        inputs, rotation = inputs.to(self._embedding.dtype), self._rotation[positions]
        for index, layer in enumerate(self._layers):
            layer.place(inputs, rotation, memory, index)


class Norm:
    """RMS norm of rows [rows, width]; identity where a model has none.

    On a CPU `rms_norm` is nine operators; `layer_norm` is one, and is the same for a row joined with its negative.
    """

    def __init__(self, weight: Tensor | None, epsilon: float, device: torch.device, dtype: torch.dtype) -> None:
        """`weight` [width]; None: no norm."""
        # A view would keep the whole checkpoint file mapped.
        own = None if weight is None else weight.to(device, dtype, copy=True)
        self._epsilon = epsilon
        self._on_host = device.type == "cpu"
        self._weight = torch.cat((own, own)) if own is not None and self._on_host else own

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, width] -> [rows, width]; on a CPU a view."""
        if self._weight is None:
            return rows
        width = rows.shape[1]
        if not self._on_host:
            return F.rms_norm(rows, (width,), self._weight, self._epsilon)
        mirrored = torch.cat((rows, -rows), dim=1)
        return F.layer_norm(mirrored, (2 * width,), self._weight, None, self._epsilon).narrow(1, 0, width)


def _rotary_table(config: ModelConfig, num_positions: int) -> Tensor:
    """[positions, dim / 2] complex64: `scaling * exp(i * position * frequency)`."""
    rope, dim, scaling = config.rope_parameters, config.head_dim, 1.0
    if rope["rope_type"] == "default":
        frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.polar(torch.tensor(float(scaling)).expand_as(angles).contiguous(), angles)


def _pairs_side_by_side(dim: int) -> Tensor:
    """[dim]: the order that makes the rotated pairs `(i, i + dim / 2)` neighbours."""
    return torch.arange(dim).view(2, dim // 2).t().reshape(dim)


def _heads(config: ModelConfig, ranks: Ranks) -> tuple[range, range]:
    """This rank's query heads and key heads."""
    keys, group = share(config.num_key_value_heads, ranks), config.num_attention_heads // config.num_key_value_heads
    return range(keys.start * group, keys.stop * group), keys


def _slots(items: range, width: int) -> slice:
    """Places of these `items` of equal width in a row."""
    return slice(items.start * width, items.stop * width)


def _reorder(pairs: Tensor, heads: range) -> Tensor:
    dim = len(pairs)
    return (torch.arange(heads.start, heads.stop).unsqueeze(1) * dim + pairs).flatten()


def _fuse(projections: list[Weights], orders: Sequence[Tensor | slice], options: LoadOptions) -> Linear:
    parts = [projection.outputs(order) for projection, order in zip(projections, orders, strict=True)]
    return options.linear(Weights.join(parts), copy=False)


def _split_inputs(weights: Weights, inputs: slice, options: LoadOptions) -> Linear:
    if options.ranks.rank > 0:
        weights = replace(weights, bias=None)  # it is added once
    return options.linear(weights.inputs(inputs))
