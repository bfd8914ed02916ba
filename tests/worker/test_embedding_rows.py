"""Test embeddings of requests that replace the embeddings of tokens, forward pass by forward
pass.
"""

import itertools

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from tests.worker.test_input_batch import int_array, new_request
from vllm.attention import LaunchContext, share_context
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.messages import MediaItem, NewRequest, TokenEmbeddings
from vllm.model_executor.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.worker.batch.launch import Launch
from vllm.worker.parts.embedding_rows import EmbeddingRows

SIZE = 4


def make_model(*modules) -> nn.Module:
    model = nn.Module()
    model.head = ParallelLMHead(16, SIZE, TPGroup())
    for index, module in enumerate(modules or [VocabParallelEmbedding(16, SIZE, TPGroup())]):
        module.weight.data = torch.arange(16.0)[:, None].repeat(1, SIZE)
        model.add_module(str(index), module)
    return model


def request_with(row: int, *spans: tuple[int, int]) -> NewRequest:
    """Return a request with given embeddings at (start, count); each value is 100 plus its
    position.
    """
    embeddings = []
    for start, count in spans:
        values = np.repeat(np.arange(start, start + count, dtype=np.float32) + 100, SIZE)
        embeddings.append(
            TokenEmbeddings(
                start=start, shape=(count, SIZE), dtype="float32", data=values.tobytes()
            )
        )
    new = new_request(row, [0] * 12)
    request = msgspec.structs.replace(new.request, embeddings=tuple(embeddings))
    return msgspec.structs.replace(new, request=request)


def run(rows: EmbeddingRows, model: nn.Module, *scheduled: tuple[int, int, int]) -> list[float]:
    """Return the embeddings of a forward pass of (batch index, first position, number of tokens).
    All tokens have id 7.
    """
    ids, first, count = (int_array(*column) for column in zip(*scheduled, strict=True))
    parts = rows.part_of(Launch(ids, first, count))
    input_ids = torch.full((int(count.sum()),), 7)
    (embedding,) = [m for m in model.children() if type(m) is VocabParallelEmbedding]
    with share_context(model).running(LaunchContext(None, input_ids, **parts)):
        found = embedding(input_ids)
    assert (found == found[:, :1]).all()
    return found[:, 0].tolist()


def test_tokens_of_any_span_are_replaced_in_every_cut_of_the_prompt():
    model = make_model()
    rows = EmbeddingRows(model, 4, torch.device("cpu"))
    rows.add(request_with(3, (1, 2), (5, 3)))
    whole = [7, 101, 102, 7, 7, 105, 106, 107, 7, 7]
    for size in range(1, 11):
        parts = [run(rows, model, (3, i, min(size, 10 - i))) for i in range(0, 10, size)]
        assert list(itertools.chain(*parts)) == whole
    both = run(rows, model, (0, 4, 1), (3, 2, 4), (1, 0, 2))
    assert both == [7, 102, 7, 7, 105, 7, 7]


def test_other_rows_and_later_requests_of_the_row_keep_their_tokens():
    model = make_model()
    rows = EmbeddingRows(model, 4, torch.device("cpu"))
    rows.add(request_with(0, (0, 4)))
    rows.add(new_request(1, [7] * 4))
    assert rows.part_of(Launch(int_array(1), int_array(0), int_array(4))) == {}
    assert rows.part_of(Launch(int_array(0), int_array(4), int_array(1))) == {}
    assert run(rows, model, (1, 0, 2), (0, 0, 2)) == [7, 7, 100, 101]
    rows.remove(0)
    rows.remove(1)
    assert run(rows, model, (1, 0, 2), (0, 0, 2)) == [7] * 4


def test_a_stage_that_looks_up_no_embeddings_knows_which_tokens_have_them():
    new = new_request(1, [7] * 12)
    image = MediaItem(modality="image", key="x", runs=((2, 3), (6, 2)), tensors=())
    request = msgspec.structs.replace(new.request, media=(image,))
    with_image = msgspec.structs.replace(new, request=request)
    rows = EmbeddingRows(None, 4, torch.device("cpu"))
    ids = int_array(1, 1, 0, 1)
    assert rows.needs_prefill(ids, int_array(2, 7, 2, 8)) is None
    rows.add(with_image)
    assert rows.needs_prefill(ids, int_array(2, 7, 2, 8)).tolist() == [True, True, False, False]
    spans = rows.spans(Launch(int_array(1), int_array(3), int_array(9)))
    assert [(span.first, len(span)) for span in spans] == [(0, 2), (3, 2)]
    rows.remove(1)
    assert rows.needs_prefill(ids, int_array(2, 7, 2, 8)) is None


def test_a_launch_that_fails_leaves_nothing_for_the_next():
    model = make_model()
    rows = EmbeddingRows(model, 4, torch.device("cpu"))
    rows.add(request_with(0, (0, 4)))
    parts = rows.part_of(Launch(int_array(0), int_array(0), int_array(4)))
    context = LaunchContext(None, torch.arange(4), **parts)
    with pytest.raises(RuntimeError, match="lost"), share_context(model).running(context):
        raise RuntimeError("lost")
    (embedding,) = [m for m in model.children() if type(m) is VocabParallelEmbedding]
    assert embedding(torch.tensor([7, 7]))[:, 0].tolist() == [7, 7]


def test_a_model_without_one_table_of_embeddings_is_refused():
    table = [VocabParallelEmbedding(16, SIZE, TPGroup()) for _ in range(2)]
    for model, count in ((make_model(*table), 2), (nn.Linear(2, 2), 0)):
        with pytest.raises(ConfigError, match=f"one table of token embeddings.* has {count}"):
            EmbeddingRows(model, 4, torch.device("cpu"))
