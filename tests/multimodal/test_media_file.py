"""Test tensors of images in files that other processes read, and how long the files exist."""

import asyncio
import gc
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.whole_items import WholeItems
from vllm.errors import RequestError
from vllm.messages import EngineRequest, MediaItem
from vllm.multimodal import media_file
from vllm.multimodal.media_file import MediaFile, inline_tensors, open_files, read_tensor
from vllm.sampling_params import SamplingParams
from vllm.worker.parts.encoded_media import EncodedMedia

TENSORS = {
    "pixels": np.arange(2 * 3 * 5, dtype=np.uint8).reshape(2, 3, 5),
    "statistics": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "grid": np.array([1, 2, 3], np.int64),
}
READ = """
import sys
import msgspec
from vllm.messages import MediaTensor
from vllm.multimodal.media_file import open_files, read_tensor
arrays = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=list[MediaTensor])
files = open_files(arrays)
for each in arrays:
    print(each.name, read_tensor(each, files).tolist())
"""


def num_files() -> int:
    """Return how many image files this process has open."""
    gc.collect()
    names = []
    for each in Path("/proc/self/fd").iterdir():
        try:
            names.append(os.readlink(each))
        except FileNotFoundError:  # the descriptor of the folder listing itself is closed by now
            continue
    return sum(name.startswith("/memfd:item-") for name in names)


def test_another_process_reads_the_same_tensors():
    file = MediaFile(TENSORS)
    assert not any(each.data for each in file.tensors)
    read = subprocess.run(
        [sys.executable, "-c", READ],
        input=msgspec.msgpack.encode(file.tensors),
        capture_output=True,
        check=True,
    )
    expected = "".join(f"{name} {array.tolist()}\n" for name, array in TENSORS.items())
    assert read.stdout.decode() == expected
    assert [read_tensor(each, {}).tolist() for each in inline_tensors(TENSORS)] == [
        array.tolist() for array in TENSORS.values()
    ]


def test_a_file_is_closed_with_its_owner_and_cannot_be_read_then():
    before = num_files()
    file = MediaFile(TENSORS)
    tensors = file.tensors
    assert num_files() == before + 1
    del file
    assert num_files() == before
    with pytest.raises((OSError, ValueError)):
        open_files(tensors)
    # Another image gets the same file descriptor.
    others = [MediaFile(TENSORS) for _ in range(3)]
    assert tensors[0].path in {other.tensors[0].path for other in others}
    with pytest.raises(ValueError, match="closed"):
        open_files(tensors)
    short = msgspec.structs.replace(others[0].tensors[0], offset=10**9)
    with pytest.raises(ValueError, match=r"must have 10000000[0-9]* bytes"):
        read_tensor(short, open_files([short]))
    del others
    assert num_files() == before


class Sums(WholeItems):
    """An encoder that makes one embedding of an image."""

    def encode(self, items):
        return [item["pixels"].sum().float().view(1, 1) for item in items]


def request_of(name, tensors):
    item = MediaItem(modality="image", key=name, runs=((0, 1),), tensors=tensors)
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[1],
        sampling_params=SamplingParams(),
        seed=1,
        eos_token_id=None,
        max_total_tokens=2,
        arrival_time=0.0,
        media=(item,),
    )


def test_a_worker_reads_files_until_the_request_has_ended_whoever_made_them():
    before, media = num_files(), EncodedMedia(Sums(), 1)
    file = MediaFile(TENSORS)
    request = request_of("a", file.tensors)
    assert media.prepare(request) is None
    del file
    (item,) = request.media
    media.add(3, request)
    assert media.read(3, item).tolist() == [[TENSORS["pixels"].sum()]]
    assert num_files() == before + 1
    media.release(["a", "unknown"])
    assert num_files() == before
    refused = media.prepare(request_of("b", request.media[0].tensors))
    assert refused is not None and "cannot be read" in refused.result()
    late = request_of("c", MediaFile(TENSORS).tensors)
    media.add(4, late)
    assert media.read(4, late.media[0]).tolist() == [[0]]
    assert media.errors_of(np.array([3, 4], np.int32)) == {
        4: "an image cannot be read: the request has ended"
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tiny_images = pytest.importorskip("tests.tiny_images", reason="images need Pillow")
    return tiny_images.make_tiny_images("llava", tmp_path_factory.mktemp("llava"))


@pytest.mark.exhaustive  # exhaustive: the tests above check that one worker reads and closes files
def test_requests_of_the_async_engine_close_their_files(folder, monkeypatch):
    from tests.tiny_images import draw_image
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.async_llm_engine import AsyncLLM
    from vllm.engine.metrics.registry import expose

    monkeypatch.setattr(media_file, "INLINE_BYTES", 0)
    settings = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 64}
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    before = num_files()

    def prompt(*seeds):
        images = [draw_image(seed) for seed in seeds]
        return {"prompt": "<image>" * len(seeds) + " and", "multi_modal_data": {"image": images}}

    async def tokens_of(engine, name, request, params=greedy):
        found = []
        async for output in engine.generate(request, params, name):
            found = list(output.outputs[0].token_ids)
        return found

    async def run():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **settings))
        try:
            same = [tokens_of(engine, f"same-{n}", prompt(1, 2)) for n in range(3)]
            found = await asyncio.gather(*same)
            assert num_files() == before
            media = engine.metrics.totals.media
            assert media.num_queries - media.num_hits == 2
            lines = expose(engine.metrics.metric_sets())[0].decode().splitlines()
            shown = {
                line.split("{")[0]: float(line.split()[-1]) for line in lines if "_total{" in line
            }
            assert shown["vllm:mm_items_total"] == 2
            assert shown["vllm:mm_cache_queries_total"] == 6
            assert shown["vllm:encoder_cache_queries_total"] == media.num_queries
            await engine.reset_mm_cache()
            assert await tokens_of(engine, "again", prompt(1, 2)) == found[0]
            read = engine.metrics.read_media().read
            assert read.num_items == {"image": 4} and read.total_seconds > 0
            runner = engine.metrics.totals.runner
            assert runner.num_encoded_items == media.num_queries - media.num_hits
            assert runner.encode_seconds > 0
            # The client leaves this stream early.
            long = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
            stream = engine.generate(prompt(3), long, "left")
            await anext(stream)
            assert num_files() == before + 1
            await stream.aclose()
            assert num_files() == before
            # This request is aborted.
            task = asyncio.ensure_future(tokens_of(engine, "aborted", prompt(4), long))
            while num_files() == before:
                await asyncio.sleep(0.001)
            await engine.abort("aborted")
            await task
            assert num_files() == before
            # The processor refuses this request after its image was read.
            wrong = {**prompt(5), "prompt": "no placeholder"}
            refused = await asyncio.gather(
                tokens_of(engine, "refused", wrong), return_exceptions=True
            )
            # Drop the error: its traceback holds the prompt.
            assert isinstance(refused.pop(), RequestError)
            assert num_files() == before
            return found
        finally:
            engine.shutdown()

    found = asyncio.run(run())
    expected = list(LLM(str(folder), **settings).generate(prompt(1, 2), greedy))
    assert found == [list(expected[0].outputs[0].token_ids)] * 3
    assert num_files() == before
