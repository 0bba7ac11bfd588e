"""llama.cpp and OpenVINO GenAI, which read the embedded target's weights from GGUF files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from experiments.peers.process import Models, Runtime

CONTEXT = 2048
"""Most tokens of a prompt and its answer."""
FILE_TYPES = {"F16": 1, "BF16": 32}
"""The name of the file type in GGUF, by the type of the matrices."""
LOOKUPS = {"plain": 0, "prompt lookup, 2 tokens": 2, "prompt lookup, 10 tokens": 10}
"""Tokens that are proposed in a pass."""


class LlamaCpp(Runtime):
    """llama.cpp by its Python package, whose own speculation is prompt lookup."""

    name = "llama.cpp"
    package = "llama-cpp-python"
    ways = LOOKUPS

    def __init__(self, models: Models, num_threads: int) -> None:
        """See `Runtime`."""
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        file = str(gguf_file(models.files, "BF16"))
        threads = {"n_threads": num_threads, "n_threads_batch": num_threads}
        self._models: dict[str, Any] = {}
        for way, length in self.ways.items():  # a model with a draft computes the logits of every token
            draft = LlamaPromptLookupDecoding(num_pred_tokens=length) if length else None
            self._models[way] = Llama(file, n_ctx=CONTEXT, draft_model=draft, verbose=False, **threads)

    def generate(self, way: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """See `Runtime`."""
        model = self._models[way]
        model.reset()  # else it would reuse what this prompt shares with the last one
        return list(itertools.islice(model.generate(prompt, temp=0.0, repeat_penalty=1.0), num_tokens))


class OpenVino(Runtime):
    """OpenVINO GenAI, in bfloat16."""

    name = "OpenVINO GenAI"
    package = "openvino-genai"
    ways = LOOKUPS

    def __init__(self, models: Models, num_threads: int) -> None:
        """See `Runtime`."""
        import openvino_genai

        file = str(gguf_file(models.files, "F16"))  # its reader knows no bfloat16
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        settings = {
            "INFERENCE_NUM_THREADS": num_threads,
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",
            "scheduler_config": scheduler,
        }
        self._plain: Any = openvino_genai.LLMPipeline(file, "CPU", **settings)
        self._lookup: Any = openvino_genai.LLMPipeline(file, "CPU", **settings, prompt_lookup=True)

    def generate(self, way: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """See `Runtime`."""
        import numpy as np
        from openvino import Tensor
        from openvino_genai import GenerationConfig, TokenizedInputs

        length = self.ways[way]
        more = {"num_assistant_tokens": length, "max_ngram_size": 2} if length else {}
        settings = GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False, **more)
        ids = np.array([prompt], dtype=np.int64)
        inputs = TokenizedInputs(Tensor(ids), Tensor(np.ones_like(ids)))
        pipeline = self._lookup if length else self._plain
        tokens: list[int] = pipeline.generate(inputs, settings).tokens[0]
        return tokens


def gguf_file(folder: Path, matrices: Literal["F16", "BF16"]) -> Path:
    """A GGUF file of the embedded target in `folder`, written first if needed (about ten seconds).

    Its values are the target's, which are bfloat16 and fit float16, too. Norms are in float32.
    """
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
    from gguf.quants import dequantize, quantize

    from amusd.checkpoints.embedded_target import find_source

    path = folder / f"target-{matrices}.gguf"
    if path.exists():
        return path
    source, writer = GGUFReader(find_source()), GGUFWriter(path, "llama")
    for name, field in source.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    writer.add_file_type(FILE_TYPES[matrices])
    stored, bfloat16 = GGMLQuantizationType[matrices], GGMLQuantizationType.BF16
    for tensor in source.tensors:
        values = dequantize(quantize(dequantize(tensor.data, tensor.tensor_type), bfloat16), bfloat16)
        kind = GGMLQuantizationType.F32 if values.ndim == 1 else stored
        writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
