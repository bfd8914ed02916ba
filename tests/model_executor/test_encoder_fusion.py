"""Test encoders that run in one call against their modules: the same bits, for texts with and
without token types, images and sounds.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.model_executor.helpers import pack_weights
from vllm.attention import LaunchContext, bind_prompt_caches, share_context, whole_prompts
from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.fusion import FusedLayers, fuse
from vllm.model_executor.media.audio.whisper_encoder import WhisperEncoder
from vllm.model_executor.media.vision.transformer import TowerLayers
from vllm.model_executor.models.bert import BertModel
from vllm.model_executor.models.roberta import RobertaModel
from vllm.multimodal.audio.whisper_config import read_whisper_config
from vllm.multimodal.images.tower_config import TowerConfig
from vllm.ops import get_ops, set_ops
from vllm.ops.cpu.operators import CPUOps, load_cpu_kernels
from vllm.utils.ragged import positions_within

pytestmark = pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")

CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"],
    "vocab_size": 90,
    "hidden_size": 72,
    "intermediate_size": 136,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 128,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "pad_token_id": 1,
}


@pytest.fixture(autouse=True)
def operators() -> Iterator[None]:
    before = get_ops()
    set_ops(CPUOps())
    yield
    set_ops(before)


@pytest.mark.parametrize(
    ("family", "dtype", "stored_as"),
    [
        (BertModel, torch.float32, "dense"),
        (BertModel, torch.bfloat16, "int8"),
        (RobertaModel, torch.bfloat16, "dense"),
    ],
)
def test_one_call_has_the_bits_of_the_modules(family, dtype, stored_as):
    torch.manual_seed(0)
    model = family(ModelArch.from_hf(CONFIG), TPGroup()).to(dtype)
    model.dtype = dtype
    for param in model.parameters():
        nn.init.normal_(param, std=param.shape[-1] ** -0.5)
    pack_weights(model, stored_as)
    counts = np.array([5, 1, 70, 16], np.int32)
    bind_prompt_caches(model, int(counts.sum()), len(counts), dtype)
    with torch.inference_mode():
        program = fuse(model)
        assert program is not None and program.num_types == 2

        def run(types, counts=counts, first=0):
            metadata = whole_prompts(counts)
            positions = torch.from_numpy(positions_within(counts))[None]
            ids = torch.arange(first, first + int(counts.sum())) % CONFIG["vocab_size"]
            given = () if types is None else (types,)
            with share_context(model).running(LaunchContext(metadata, positions)):
                want = model(ids, positions, *given)
            tensors = (metadata.slot_mapping, metadata.block_tables, metadata.seq_lens)
            starts = torch.from_numpy(metadata.query_start_loc)
            got = program.forward(
                *(ids, positions, *tensors, starts, 0),
                last_keys=metadata.last_keys,
                token_types=types,
            )
            assert torch.equal(got, want)
            return got

        run(torch.arange(int(counts.sum())) % 2)
        together, first = run(None), 0
        for count in counts:
            alone = run(None, np.array([count], np.int32), first)
            assert torch.equal(alone, together[first : first + count])
            first += count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["clip", "whisper"])
def test_layers_of_items_in_one_call_have_the_bits_of_the_layers(kind, dtype):
    torch.manual_seed(0)
    if kind == "clip":
        settings = {"model_type": "clip_vision_model", "hidden_act": "quick_gelu"}
        sizes = {"hidden_size": 72, "intermediate_size": 136, "num_attention_heads": 3}
        owner = TowerLayers(TowerConfig(**settings, **sizes), 3)
    else:
        sizes = {"d_model": 72, "encoder_ffn_dim": 136, "encoder_attention_heads": 3}
        owner = WhisperEncoder(read_whisper_config({**sizes, "encoder_layers": 3}))
    stack = owner.layers.to(dtype)
    for param in stack.parameters():
        nn.init.normal_(param, std=param.shape[-1] ** -0.5)
    pack_weights(stack)
    fused = FusedLayers(stack, dtype)

    def check(num_items: int, num_tokens: int, wanted: tuple[int, ...]) -> None:
        x = torch.randn(num_items, num_tokens, 72, dtype=dtype)
        want = stack.run(x.clone(), wanted)
        got = fused(x.clone(), wanted)
        assert got is not None, "the layers were not recorded"
        assert all(torch.equal(got[count], want[count]) for count in wanted)

    with torch.inference_mode():
        check(2, 33, (3,))
        check(1, 5, (0, 1, 3))  # less memory is needed, and other hidden states
        check(5, 50, (3, 2))  # more memory is needed
        check(2, 33, (3,))
        assert fused(torch.randn(1, 5, 72, dtype=torch.float16), (3,)) is None
        stack.run_all = fused
        x, mask = torch.randn(1, 9, 72, dtype=dtype), (torch.arange(9) < 4)[None, None, None]
        masked = stack.run(x.clone(), (3,), mask)[3]
        assert not torch.equal(masked, stack.run(x.clone(), (3,))[3])
