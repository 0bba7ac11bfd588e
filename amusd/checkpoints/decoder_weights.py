"""Makes a `Decoder` of a model's weights: checks, splits, reorders and packs them, on their device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from amusd.checkpoints.configuration import ModelConfig, layer_windows
from amusd.checkpoints.vocabulary import EMBEDDING, HEAD
from amusd.errors import ConfigError
from amusd.models.attention import Window
from amusd.models.decoder import Decoder, Layer, Norm, norm_on_cpu
from amusd.models.features import FeatureTaps
from amusd.models.fused import add_and_norm
from amusd.models.linear import INT8, Linear, Weights, make_linear, multiplies_fp16
from amusd.models.sharding import Ranks, share, share_of_outputs
from amusd.runner.load_options import LoadOptions, loaded_dtype

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


def bias_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the biases that the configuration asks for, as in transformers."""
    attention = "qkvo" if getattr(config, "attention_bias", False) else ""
    biased = {f"{name}_proj" for name in {"qwen2": "qkv", "mistral": ""}.get(config.model_type, attention)}
    if config.model_type == "llama" and getattr(config, "mlp_bias", False):
        biased |= {"gate_proj", "up_proj", "down_proj"}
    return {name: shape for name, shape in _biases_for(weight_shapes(config)).items() if name.split(".")[-2] in biased}


def _biases_for(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name.removesuffix("weight") + "bias": shape[:1] for name, shape in shapes.items() if len(shape) > 1}


def fit_weights(
    owner: str, given: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, all_given: bool = False
) -> dict[str, Tensor]:
    """The weights that `shapes` names, and their biases.

    Raises `ConfigError` for a missing or misshaped weight, or with `all_given` for a further one.
    """
    wanted = {**shapes, **{name: shape for name, shape in _biases_for(shapes).items() if name in given}}
    if missing := wanted.keys() - given.keys():
        raise ConfigError(f"{owner}: lacks weights, {min(missing)} among them")
    if all_given and (extra := given.keys() - wanted.keys()):
        raise ConfigError(f"{owner}: its file has weights without a place, {min(extra)} among them")
    for name, shape in wanted.items():
        if (found := given[name].shape) != shape:
            raise ConfigError(f"{owner}: {name} has shape {list(found)}, and config.json asks for {list(shape)}")
    return {name: given[name] for name in wanted}


def load_decoder(weights: dict[str, Tensor], config: ModelConfig, options: LoadOptions, max_positions: int) -> Decoder:
    """Make the decoder of a model, or this rank's share.

    `weights`: by the names of `weight_shapes`; each is removed when read. `max_positions`: rows of the rotary table.
    """
    device, dtype, ranks = torch.device(options.device), loaded_dtype(options.dtype), options.ranks
    weight_bytes = _bytes_per_pass(weights, options)
    layers, norms = [], []
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        names = [name for name in weights if name.startswith(prefix)]
        own = {name.removeprefix(prefix): weights.pop(name) for name in names}
        norms.append(load_norm(own.get("input_layernorm.weight"), config.rms_norm_eps, options))
        layers.append(_load_layer(index, own, config, options))
    norms.append(load_norm(weights.pop("model.norm.weight", None), config.rms_norm_eps, options))
    stored, head = weights.pop(EMBEDDING), Weights.pop(weights, "lm_head")
    is_tied = head.matrix is stored
    embedding = stored.to(device, dtype, copy=True)
    del stored
    if is_tied and not multiplies_fp16(device, dtype):  # FBGEMM copies its weights in any case
        head = replace(head, matrix=embedding)
    return Decoder(
        embedding=embedding,
        rotation=_rotary_table(config, max_positions).to(device),
        layers=layers,
        norms=norms,
        head=load_linear(head.each(partial(share_of_outputs, ranks=ranks)), options, copy=not is_tied),
        taps=FeatureTaps(options.features, device, dtype) if options.features else None,
        ranks=ranks,
        device=device,
        cache_dtype=torch.float32 if device.type == "cpu" else dtype,
        num_ids=len(embedding),
        vocab_size=len(head.matrix),
        weight_bytes=weight_bytes,
        attention_shape=_attention_shape(config, ranks),
    )


def _load_layer(index: int, weights: dict[str, Tensor], config: ModelConfig, options: LoadOptions) -> Layer:
    dim, epsilon, size = config.head_dim, config.rms_norm_eps, layer_windows(config)[index]
    queries, keys = _heads(config, options.ranks)
    query, key, value, output = (Weights.pop(weights, f"self_attn.{name}_proj") for name in "qkvo")
    gate, up, down = (Weights.pop(weights, f"mlp.{name}_proj") for name in ("gate", "up", "down"))
    pairs = torch.arange(dim).view(2, dim // 2).t().reshape(dim)  # rotated pairs (i, i + dim / 2) become neighbours
    units = _span(share(len(gate.matrix), options.ranks), 1)
    head_norm = None
    if "self_attn.q_norm.weight" in weights:
        of_query, of_key = (weights[f"self_attn.{name}_norm.weight"].float()[pairs] for name in "qk")
        expanded = of_query.expand(len(queries), -1), of_key.expand(len(keys), -1)
        head_norm = torch.cat(expanded).to(options.device)
    orders = _reorder(pairs, queries), _reorder(pairs, keys), _span(keys, dim)
    return Layer(
        index=index,
        query_key_value=_fuse([query, key, value], orders, options),
        head_norm=head_norm,
        output=_split_inputs(output, _span(queries, dim), options),
        mlp_norm=load_norm(weights["post_attention_layernorm.weight"], epsilon, options),
        gate_up=_fuse([gate, up], [units, units], options),
        down=_split_inputs(down, units, options),
        num_queries=len(queries),
        num_keys=len(keys),
        dim=dim,
        epsilon=epsilon,
        ranks=options.ranks,
        window=None if size is None else Window(size),
    )


def load_linear(weights: Weights, options: LoadOptions, *, copy: bool = True) -> Linear:
    """The layer on its device. `copy`: copy weights, since views would keep a whole checkpoint file mapped."""
    own = weights.each(lambda tensor: tensor.to(options.device, copy=copy))
    return make_linear(own, loaded_dtype(options.dtype), int8=options.dtype == INT8)


def load_norm(weight: Tensor | None, epsilon: float, options: LoadOptions) -> Norm:
    """The norm with `weight` [width]; None: identity."""
    if weight is None:
        return lambda hidden, _parts=None: hidden
    # A view would keep the whole checkpoint file mapped.
    own = weight.to(options.device, loaded_dtype(options.dtype), copy=True)
    if own.device.type == "cpu":
        return partial(norm_on_cpu, weight=torch.cat((own, own)), epsilon=epsilon)
    return lambda hidden, parts=None: add_and_norm(hidden, parts, own, epsilon)


def _bytes_per_pass(weights: Mapping[str, Tensor], options: LoadOptions) -> int:
    """Bytes of weights that one pass of a rank reads, with the head and without the embedding."""
    dtype = loaded_dtype(options.dtype)
    item = dtype.itemsize
    if multiplies_fp16(torch.device(options.device), dtype):
        item = 1 if options.dtype == INT8 else min(item, weights[EMBEDDING].itemsize)
    return sum(tensor.numel() for name, tensor in weights.items() if name != EMBEDDING) * item // options.ranks.size


def _attention_shape(config: ModelConfig, ranks: Ranks) -> tuple[int, int, int] | None:
    if any(width % _VECTOR for width in (config.hidden_size, config.intermediate_size, config.head_dim)):
        return None
    queries, keys = _heads(config, ranks)
    return len(queries), len(keys), config.head_dim


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


def _heads(config: ModelConfig, ranks: Ranks) -> tuple[range, range]:
    """This rank's query heads and key heads."""
    keys, group = share(config.num_key_value_heads, ranks), config.num_attention_heads // config.num_key_value_heads
    return range(keys.start * group, keys.stop * group), keys


def _span(items: range, width: int) -> slice:
    """The rows or columns of these `items`, `width` for each."""
    return slice(items.start * width, items.stop * width)


def _reorder(pairs: Tensor, heads: range) -> Tensor:
    dim = len(pairs)
    return (torch.arange(heads.start, heads.stop).unsqueeze(1) * dim + pairs).flatten()


def _fuse(projections: list[Weights], orders: Sequence[Tensor | slice], options: LoadOptions) -> Linear:
    parts = [projection.each(itemgetter(order)) for projection, order in zip(projections, orders, strict=True)]
    return load_linear(Weights.join(parts), options, copy=False)


def _split_inputs(weights: Weights, inputs: slice, options: LoadOptions) -> Linear:
    bias = weights.bias if options.ranks.rank == 0 else None  # ranks' products are summed
    return load_linear(Weights(weights.matrix[:, inputs], bias), options)
