"""Attention of a few rows over many keys: the torch operator, and the Triton kernels in their interpreter.

Triton runs in a child process (`TritonProcess`): whether kernels are interpreted is decided when it is imported.
"""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from amusd.errors import MissingDependencyError
from amusd.models import row_attention
from amusd.models.row_attention import attend_rows
from tests.models.attention_cases import (
    Attend,
    Inputs,
    Shape,
    Tokens,
    compare,
    lay_out,
    random_tokens,
)
from tests.models.triton_process import TritonProcess, example

GROUPS = {"group 1": Shape(2, 2), "group 3": Shape(6, 2), "group 4": Shape(4, 1), "group 8": Shape(8, 1)}


@pytest.fixture(scope="module")
def interpreter() -> Iterator[TritonProcess]:
    with TritonProcess() as process:
        yield process


@pytest.fixture(scope="module")
def compiler() -> Iterator[TritonProcess]:
    with TritonProcess(90) as process:
        yield process


@pytest.fixture(params=["torch", "triton"])
def attend(request: pytest.FixtureRequest) -> Attend:
    if request.param == "torch":
        return lambda inputs: attend_rows(*inputs)
    process: TritonProcess = request.getfixturevalue("interpreter")
    return process.attend


def sequences(rng: random.Random, shape: Shape, lengths: tuple[int, ...], num_nodes: int, tree: bool) -> list[Tokens]:
    return [random_tokens(rng, shape, length, num_nodes, tree=tree) for length in lengths]


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("lengths", [(1,), (62, 254)], ids=str)
def test_a_row_has_the_bits_that_it_has_alone(attend: Attend, lengths: tuple[int, ...], group: str, tree: bool) -> None:
    rng = random.Random(f"{lengths} {group} {tree}")
    found = compare(attend, sequences(rng, GROUPS[group], lengths, 3, tree), rng, chain=not tree, spare=70)
    assert found.num_equal == found.num_rows == 3 * len(lengths)
    assert found.max_error < 1e-6


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_row_has_its_bits_behind_thousands_of_keys(attend: Attend, tree: bool) -> None:
    rng = random.Random(4093)
    found = compare(attend, sequences(rng, Shape(1, 1, 16), (4094,), 2, tree), rng, chain=not tree, spare=500)
    assert found.num_equal == found.num_rows == 2
    assert found.max_error < 1e-6


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_row_has_its_bits_beside_seven_other_sequences(attend: Attend, tree: bool) -> None:
    rng = random.Random(8)
    lengths = (1, 2, 31, 63, 64, 65, 128, 200)
    found = compare(attend, sequences(rng, Shape(3, 1, 16), lengths, 2, tree), rng, chain=not tree, spare=3)
    assert found.num_equal == found.num_rows == 16


def test_a_row_has_its_bits_in_any_tile(attend: Attend) -> None:
    rng = random.Random(16)  # a group of 16 makes tiles of 4 rows
    found = compare(attend, sequences(rng, Shape(16, 1, 16), (60,), 9, tree=True), rng, chain=False, spare=3)
    assert found.num_equal == found.num_rows == 9


@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str)
def test_half_precision_is_as_exact_in_its_bits(attend: Attend, dtype: torch.dtype, error: float) -> None:
    rng = random.Random(2)
    found = compare(attend, sequences(rng, Shape(4, 1, 16, dtype), (126,), 4, tree=True), rng, chain=False, spare=9)
    assert found.num_equal == found.num_rows == 4
    assert found.max_error < error


@pytest.mark.parametrize(
    ("num_positions", "number"), [(0, 0), (1, 1), (200, 4), (1024, 16), (1025, 17), (1281, 18), (32_768, 140)]
)
def test_a_short_context_is_split_for_many_multiprocessors_and_a_long_one_hardly_more(
    num_positions: int, number: int
) -> None:
    assert row_attention.num_splits(num_positions) == number


@pytest.mark.parametrize("num_programs", [1, 3])
def test_who_computes_a_split_does_not_matter(interpreter: TritonProcess, num_programs: int) -> None:
    rng = random.Random(5)
    inputs, _ = lay_out(sequences(rng, Shape(1, 1, 16), (1300,), 3, tree=True), rng, chain=False, spare=10)
    assert torch.equal(interpreter.attend(inputs, num_programs=num_programs), interpreter.attend(inputs))


def test_a_wider_table_changes_nothing(attend: Attend) -> None:
    rng = random.Random(6)
    query, keys, values, table, *rest = lay_out(
        sequences(rng, GROUPS["group 4"], (100, 7), 3, tree=True), rng, chain=False
    )[0]
    wide = torch.cat((table, torch.full((2, 3000), -1)), dim=1)
    assert torch.equal(attend((query, keys, values, wide, *rest)), attend((query, keys, values, table, *rest)))


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_the_kernels_agree_with_plain_torch(interpreter: TritonProcess, dim: int) -> None:
    rng = random.Random(dim)
    inputs, _ = lay_out(sequences(rng, Shape(6, 2, dim), (300, 20), 5, tree=True), rng, chain=False, spare=20)
    torch.testing.assert_close(interpreter.attend(inputs), attend_rows(*inputs), rtol=0, atol=1e-6)


def explicit(inputs: Inputs, softcap: float, sinks: Tensor) -> Tensor:
    """Attention of a chain, from the definition; `sinks` [heads]."""
    query, keys, values, table, _, _, _, positions, scaling = inputs
    result = torch.zeros_like(query)
    for row, position in enumerate(positions[0].tolist()):
        slots = table[0, : position + 1]
        for head in range(query.shape[2] if position >= 0 else 0):
            key_head = head * keys.shape[0] // query.shape[2]
            scores = keys[key_head, slots] @ query[0, row, head] * scaling
            scores = torch.cat((softcap * torch.tanh(scores / softcap), sinks[head : head + 1]))
            result[0, row, head] = scores.softmax(0)[:-1] @ values[key_head, slots]
    return result


def test_scores_can_be_bounded_and_sinks_take_their_share(interpreter: TritonProcess) -> None:
    rng = random.Random(7)
    inputs, placed = lay_out(sequences(rng, Shape(4, 2), (270,), 3, tree=False), rng, chain=True, spare=2)
    inputs = (inputs[0] * 4, *inputs[1:])
    sinks = torch.tensor([-1.0, 0.5, 2.0, 6.0])
    wanted = explicit(inputs, 1.5, sinks)
    assert None in placed[0]
    for found in (attend_rows(*inputs, 1.5, sinks), interpreter.attend(inputs, 1.5, sinks)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)


def test_the_cpu_kernel_reads_nothing_on_the_host() -> None:
    rng = random.Random(1)
    inputs, _ = lay_out(sequences(rng, Shape(), (5, 70), 3, tree=True), rng, chain=False)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in inputs]
        assert attend_rows._init_fn(*fake).shape == inputs[0].shape  # a read would raise


def test_fake_tensors_on_a_gpu_pass_through_the_operator() -> None:
    with FakeTensorMode():
        inputs = example(Shape(32, 8, 128, torch.bfloat16), seqs=2, rows=8, width=4096, paths=4)
        query, *rest = (each.to("cuda:1") if isinstance(each, Tensor) else each for each in inputs)
        result = attend_rows(query, *rest)
    assert (result.shape, result.dtype, str(result.device)) == (query.shape, torch.bfloat16, "cuda:1")


def test_the_operator_keeps_to_its_schema() -> None:
    rng = random.Random(1)
    inputs, _ = lay_out(sequences(rng, Shape(), (5,), 3, tree=True), rng, chain=False)
    torch.library.opcheck(attend_rows, inputs, test_utils=("test_schema", "test_faketensor"))


def test_keys_that_do_not_suit_the_query_are_refused(interpreter: TritonProcess) -> None:
    query, keys, values, *rest = example(Shape(6, 2), seqs=1, rows=1, width=8, paths=1)
    with pytest.raises(ValueError, match="does not suit"):
        attend_rows(query[:, :, :5], keys, values, *rest)
    with pytest.raises(ValueError, match="whole slots"):
        interpreter.attend((query, keys.mT.contiguous().mT, values, *rest))


def test_triton_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'amusd\[gpu\]'"):
        row_attention.require_triton("cuda:0")


def test_importing_the_operator_does_not_import_triton() -> None:
    code = "import sys, amusd.models.row_attention; sys.stdout.write(str('triton' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout == "False"


@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(9, 3, 64), (64, 8, 128)])
def test_one_kernel_of_each_kind_is_compiled_for_hopper_and_fits(
    compiler: TritonProcess, heads: int, key_heads: int, dim: int
) -> None:
    shape = Shape(heads, key_heads, dim, torch.bfloat16)
    passes = [
        (example(shape, seqs=1, rows=1, width=256, paths=0), False),
        (example(shape, seqs=1, rows=8, width=2048, paths=3), True),
        (example(shape, seqs=8, rows=16, width=131_072, paths=16), False),
    ]
    kernels = compiler.compile(passes)
    assert sorted(kernel.name for kernel in kernels) == ["_attend_splits", "_combine_splits"]
    assert all(kernel.spilled_bytes <= 32 for kernel in kernels)  # none with triton 3.7, 4 with 3.6
    assert all(2 * kernel.shared_bytes <= 227 * 1024 for kernel in kernels)  # two programs of a multiprocessor
    assert [kernel.num_async_copies > 0 for kernel in sorted(kernels, key=lambda kernel: kernel.name)] == [True, False]
