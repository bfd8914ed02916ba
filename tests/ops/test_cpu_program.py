"""Test what a program refuses, and that its result does not depend on threads.

model_executor/test_fusion.py compares it with the modules of a model.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.loops import loop_over
from vllm.ops.attention_options import AttentionOptions
from vllm.ops.cpu.operators import CPUOps, load_cpu_kernels
from vllm.ops.cpu.operators.program import Program
from vllm.ops.cpu.operators.recorder import Recorder
from vllm.ops.cpu.symbols import Ids, NotFusibleError, Rows
from vllm.ops.cpu.weights.linear import PackedWeight
from vllm.ops.cpu.weights.weight_format import WeightFormat

pytestmark = pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")

# Sizes at which five tokens are enough work for a second thread.
HIDDEN, SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 32, 10240, 4, 2, 16
VOCAB_SIZE, MAX_POSITIONS, NUM_BLOCKS, BLOCK_SIZE = 50, 40, 90, 8


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(num_threads)


def packed(num_out: int, num_in: int) -> PackedWeight:
    return PackedWeight.pack((torch.randn(num_out, num_in) * num_in**-0.5).bfloat16())


@dataclass(frozen=True)
class Layer:
    qkv: Any
    output: Any
    gate_up: Any
    down: Any
    input_norm: Any
    attention_norm: Any
    key_cache: Any
    value_cache: Any
    output_bias: Any = None
    key_norm: Any = None


@dataclass(frozen=True)
class Model:
    layers: Sequence[Layer]
    embedding: Any
    final_norm: Any
    cos_sin: Any


def make_layer() -> Layer:
    q_size, kv_size = NUM_HEADS * HEAD_SIZE, NUM_KV_HEADS * HEAD_SIZE
    cache = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE).bfloat16()
    return Layer(
        qkv=packed(q_size + 2 * kv_size, HIDDEN),
        output=packed(HIDDEN, q_size),
        gate_up=packed(2 * SIZE, HIDDEN),
        down=packed(HIDDEN, SIZE),
        input_norm=torch.ones(HIDDEN).bfloat16(),
        attention_norm=torch.ones(HIDDEN).bfloat16(),
        key_cache=cache[0],
        value_cache=cache[1],
    )


def make_model() -> Model:
    return Model(
        layers=[make_layer(), make_layer()],
        embedding=torch.randn(VOCAB_SIZE, HIDDEN).bfloat16(),
        final_norm=torch.ones(HIDDEN).bfloat16(),
        cos_sin=torch.rand(MAX_POSITIONS, HEAD_SIZE),
    )


def record_layer(recorder: Recorder, layer: Layer, cos_sin: Tensor, x: Rows) -> Rows:
    """Record attention and MLP of a layer; return the outputs. x is already normalised."""
    q_size, kv_size = NUM_HEADS * HEAD_SIZE, NUM_KV_HEADS * HEAD_SIZE
    parts = recorder.linear(x, layer.qkv, None).split([q_size, kv_size, kv_size])
    query, key, value = (part.unflatten(-1, (-1, HEAD_SIZE)) for part in parts)
    if layer.key_norm is not None:
        key = recorder.rms_norm(key, layer.key_norm, 1e-5)
    positions = Ids(recorder, is_position=True)
    query, key = recorder.rotary_embedding(positions, query, key, cos_sin, True)
    attention = SimpleNamespace(
        key_cache=layer.key_cache,
        value_cache=layer.value_cache,
        options=AttentionOptions(),
        alibi_slopes=None,
        sinks=None,
        cache_group=0,
    )
    attended = recorder.attend(attention, query, key, value).flatten(1)
    return recorder.linear(attended, layer.output, layer.output_bias)


def program_of(model: Model) -> Program:
    recorder = Recorder(model.final_norm.dtype)
    residual = recorder.lookup(Ids(recorder, is_position=False), model.embedding)
    out = None
    for layer in model.layers:
        if out is None:
            x = recorder.rms_norm(residual, layer.input_norm, 1e-5)
        else:
            x, residual = recorder.fused_add_rms_norm(out, residual, layer.input_norm, 1e-5)
        out = record_layer(recorder, layer, model.cos_sin, x)
        x, residual = recorder.fused_add_rms_norm(out, residual, layer.attention_norm, 1e-5)
        act = recorder.silu_and_mul(recorder.linear(x, layer.gate_up, None))
        out = recorder.linear(act, layer.down, None)
    return Program(recorder, recorder.fused_add_rms_norm(out, residual, model.final_norm, 1e-5)[0])


def launch_of(num_decodes: int = 2, num_prefill: int = 3) -> dict[str, Any]:
    """Return the inputs of decodes at position 9 and one prompt; every request has two blocks."""
    num_requests = num_decodes + (num_prefill > 0)
    tables = torch.arange(1, 1 + 2 * num_requests, dtype=torch.int32).view(-1, 2)
    positions = torch.tensor([9] * num_decodes + list(range(num_prefill)), dtype=torch.int64)
    rows = torch.tensor([*range(num_decodes), *[num_decodes] * num_prefill], dtype=torch.int64)
    blocks = tables[rows, positions // BLOCK_SIZE]
    return {
        "inputs": torch.arange(len(positions)),
        "positions": positions[None],
        "slot_mapping": blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        "block_tables": tables,
        "seq_lens": torch.tensor([10] * num_decodes + [num_prefill] * (num_prefill > 0)).int(),
        "query_start_loc": torch.tensor([*range(num_decodes + 1), len(positions)]).int()[
            : num_requests + 1
        ],
        "num_decodes": num_decodes,
    }


def changed(x: Tensor, index: int, value: int) -> Tensor:
    x = x.clone()
    x.view(-1)[index] = value
    return x


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("inputs", 4, VOCAB_SIZE, r"input_ids\[4\] must be .* of 50, got 50"),
        ("inputs", 0, -1, r"input_ids\[0\] must be .*, got -1"),
        ("positions", 3, MAX_POSITIONS, r"positions\[:, 3\] must be below 40, .* got \[40\]"),
        (
            "slot_mapping",
            1,
            NUM_BLOCKS * BLOCK_SIZE,
            r"slot_mapping\[1\] must be one of the 720 slots of the KV cache, got 720",
        ),
        ("seq_lens", 1, 17, "request 1 has 17 tokens"),
        ("seq_lens", 2, 2, "request 2 has 2 tokens"),
        ("block_tables", 3, NUM_BLOCKS, r"request 1 has 10 tokens and the blocks \[3, 90\]"),
        ("block_tables", 4, -1, r"request 2 has 3 tokens and the blocks \[-1, 6\]"),
    ],
)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_numbers_out_of_range_are_refused(name, index, value, message, num_threads):
    torch.set_num_threads(num_threads)
    decoder, launch = program_of(make_model()), launch_of()
    want = decoder.forward(**launch)
    with pytest.raises(IndexError, match=message):
        decoder.forward(**launch | {name: changed(launch[name], index, value)})
    assert torch.equal(decoder.forward(**launch), want)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("inputs", lambda x: x.int()),
        ("positions", lambda x: x[:, :-1]),
        ("positions", lambda x: x.repeat(3, 1)),
        ("positions", lambda x: x[0]),
        ("slot_mapping", lambda x: x.repeat_interleave(2)[::2]),
        ("block_tables", lambda x: x.long()),
        ("block_tables", lambda x: x.T.contiguous().T),
        ("block_tables", lambda x: x[:-1]),
        ("seq_lens", lambda x: x[:-1]),
        ("query_start_loc", lambda x: x.long()),
        # One row is in neither the decodes nor the prefills.
        ("query_start_loc", lambda x: x + (x > 0)),
        ("num_decodes", lambda x: 3),
        ("num_decodes", lambda x: -1),
        ("inputs", lambda x: x.to("meta")),
        ("block_tables", lambda x: x.to("meta")),
    ],
)
def test_tensors_of_another_form_are_refused(name, make):
    launch = launch_of()
    with pytest.raises(ValueError):
        program_of(make_model()).forward(**launch | {name: make(launch[name])})


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("qkv", lambda: packed(HIDDEN, HIDDEN)),
        ("down", lambda: PackedWeight.pack(torch.zeros(HIDDEN, SIZE))),
        ("output_bias", lambda: torch.zeros(HIDDEN)),
        ("key_norm", lambda: torch.ones(HEAD_SIZE + 1).bfloat16()),
        ("value_cache", lambda: torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 1, HEAD_SIZE).bfloat16()),
        ("key_cache", lambda: torch.zeros(1, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE).bfloat16()),
        ("input_norm", lambda: torch.ones(2 * HIDDEN).bfloat16()[::2]),
        ("input_norm", lambda: torch.ones(HIDDEN, device="meta").bfloat16()),
        ("key_cache", lambda: None),
        ("value_cache", lambda: None),
    ],
)
def test_layers_that_do_not_fit_are_refused(name, make):
    model = make_model()
    layer = dataclasses.replace(model.layers[1], **{name: make()})
    with pytest.raises(NotFusibleError):
        program_of(dataclasses.replace(model, layers=[model.layers[0], layer]))


def test_models_that_do_not_fit_are_refused():
    table = torch.randn(VOCAB_SIZE, HIDDEN).bfloat16()
    for change in (
        {"embedding": table[:, :-1]},
        {"final_norm": torch.ones(HIDDEN).half()},
        {"final_norm": torch.ones(2 * HIDDEN).bfloat16()[::2]},
        {"final_norm": torch.ones(HIDDEN, device="meta").bfloat16()},
        {"cos_sin": torch.ones(MAX_POSITIONS, HEAD_SIZE + 2)},
    ):
        with pytest.raises(NotFusibleError):
            program_of(dataclasses.replace(make_model(), **change))


@pytest.mark.parametrize("weight_format", [WeightFormat.INT8, WeightFormat.INT4])
def test_embeddings_may_be_rows_of_a_quantized_weight(weight_format):
    table = PackedWeight.quantize(torch.randn(VOCAB_SIZE, HIDDEN).bfloat16(), weight_format)
    model, launch = make_model(), launch_of()
    rows = table.rows(torch.arange(VOCAB_SIZE), torch.bfloat16)
    want = program_of(dataclasses.replace(model, embedding=rows)).forward(**launch)
    got = program_of(dataclasses.replace(model, embedding=table)).forward(**launch)
    assert torch.equal(got, want)


def test_any_number_of_threads_has_the_same_bits():
    """There may be more threads than cores, so no thread may wait for one that does not run."""
    decoder = program_of(make_model())
    for launch in (launch_of(1, 0), launch_of(4, 14), launch_of(0, 16), launch_of(40, 0)):
        torch.set_num_threads(1)
        want = decoder.forward(**launch)
        for num_threads in (2, 3, 8):
            torch.set_num_threads(num_threads)
            assert torch.equal(decoder.forward(**launch), want)


def test_decoders_of_several_engines_may_run_at_once():
    decoders, launches = [program_of(make_model()) for _ in range(3)], [launch_of(40, 0)] * 3
    launches[1] = launch_of(4, 14)
    want = [d.forward(**launch) for d, launch in zip(decoders, launches, strict=True)]

    def run(index: int) -> bool:
        torch.set_num_threads(1 + index)
        got = [decoders[index].forward(**launches[index]) for _ in range(20)]
        return all(torch.equal(out, want[index]) for out in got)

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(run, range(3)))


def test_a_token_without_a_slot_is_computed_and_not_kept():
    model, launch = make_model(), launch_of(0, 6)
    cache = model.layers[0].key_cache
    program_of(model).forward(**launch | {"slot_mapping": changed(launch["slot_mapping"], 5, -1)})
    written = cache.flatten(0, 1)[launch["slot_mapping"]].flatten(1).any(1)
    assert written.tolist() == [True] * 5 + [False]


def test_a_launch_without_tokens_gives_no_rows():
    assert program_of(make_model()).forward(**launch_of(0, 0)).shape == (0, HIDDEN)


def program_of_types(dtype: torch.dtype, is_tanh: bool, quantized: bool, keeps: bool):
    """Return a program of embeddings, a matmul and GELU, and the same computed by operators."""
    torch.manual_seed(1)
    tokens, types = (torch.randn(n, HIDDEN).to(dtype) for n in (VOCAB_SIZE, 3))
    weight, bias = torch.randn(70, HIDDEN).to(dtype), torch.randn(70).to(dtype)
    made = PackedWeight.quantize(weight, WeightFormat.INT8) if quantized else None
    made = made or PackedWeight.pack(weight.clone())
    recorder = Recorder(dtype)

    def compute(ops, tokens_of, types_of) -> Any:
        linear = made.linear(tokens_of + types_of, bias)
        activated = ops.gelu(linear, is_tanh)
        return activated + linear if keeps else activated

    rows = recorder.lookup(Ids(recorder, is_position=False), tokens)
    of_type = recorder.lookup(Ids(recorder, is_position=False, is_type=True), types)
    program = Program(recorder, compute(recorder, rows, of_type))
    return program, lambda ids, of: compute(CPUOps(), tokens[ids], types[of])


@loop_over("keeps", [False, True])
@loop_over("is_tanh", [False, True])
@loop_over(
    "dtype, quantized", [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_an_activated_matmul_has_the_bits_of_both(dtype, quantized, is_tanh, keeps, isa):
    program, compute = program_of_types(dtype, is_tanh, quantized, keeps)
    launch, types = launch_of(), torch.tensor([0, 2, 1, 1, 0])
    got = program.forward(**launch, token_types=types)
    assert torch.equal(got, compute(launch["inputs"], types))
    assert torch.equal(program.forward(**launch), compute(launch["inputs"], types * 0))


def test_types_of_tokens_out_of_range_are_refused():
    program, _ = program_of_types(torch.float32, False, False, False)
    with pytest.raises(IndexError, match=r"token_types\[1\] is 3, it must be below 3"):
        program.forward(**launch_of(), token_types=torch.tensor([0, 3, 1, 1, 0]))
    with pytest.raises(ValueError, match="token_types"):
        program.forward(**launch_of(), token_types=torch.tensor([0]))
