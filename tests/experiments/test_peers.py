"""The runtimes that stand beside ours: which ones run, and that their weights are the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from amusd.checkpoints import embedded_target
from experiments.peers.native import gguf_file
from experiments.peers.process import installed
from experiments.peers.stock import Transformers


class Absent(Transformers):
    name = "Absent"
    package = "not-installed-anywhere"


def test_a_runtime_that_is_not_installed_is_one_line_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(installed([Absent, Transformers])) == [Transformers]
    assert capsys.readouterr().err == "Absent is left out: pip install not-installed-anywhere\n"


@pytest.mark.parametrize(("matrices", "file_type"), [("F16", 1), ("BF16", 32)])
def test_a_gguf_file_has_the_values_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, matrices: Literal["F16", "BF16"], file_type: int
) -> None:
    source, random = tmp_path / "source.gguf", np.random.default_rng(0)
    matrix, norm = (random.normal(size=shape).astype(np.float32) for shape in ((8, 64), (64,)))
    q4 = GGMLQuantizationType.Q4_1
    writer = GGUFWriter(source, "llama")
    writer.add_token_list(["a", "b"])
    writer.add_file_type(3)
    writer.add_tensor("matrix", quantize(matrix, q4), raw_dtype=q4)
    writer.add_tensor("norm", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(embedded_target, "find_source", lambda: source)
    reader = GGUFReader(gguf_file(tmp_path, matrices))
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert reader.fields["general.file_type"].contents() == file_type
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds == {"matrix": matrices, "norm": "F32"}
    for tensor, before in zip(reader.tensors, (dequantize(quantize(matrix, q4), q4), norm), strict=True):
        rounded = torch.from_numpy(before).to(torch.bfloat16).float().numpy()
        np.testing.assert_array_equal(dequantize(tensor.data, tensor.tensor_type), rounded)
