"""Run `vllm bench throughput`: submit all requests at once to an engine, without a server."""

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.bench import offline, report
from vllm.entrypoints.bench.backends import BenchRequest
from vllm.entrypoints.bench.dataset_args import add_dataset_flags, read_dataset_flags
from vllm.entrypoints.bench.datasets import (
    DatasetArgs,
    file_requests,
    ordinary_ids,
    random_requests,
    with_images,
)
from vllm.errors import ConfigError
from vllm.utils.arguments import add_switch

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import RequestOutput


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_dataset_flags(parser, input_len=512, num_prompts=1000)
    add_switch(parser, "--disable-tqdm", "do not show a progress bar")
    offline.add_cli_args(parser)


def run(args: argparse.Namespace) -> None:
    """Run the benchmark. Prints a table to stdout, and JSON if requested.

    Raises:
        RequestError: n and temperature contradict each other.
        ConfigError: a flag is out of range, a file cannot be used, or the engine cannot start.
    """
    dataset = read_dataset_flags(args)
    offline.sampling(1, args)  # wrong arguments raise before the model is loaded
    report.check_writable(args.output_json)
    llm = offline.make_llm(args)
    requests = _make_requests(llm, dataset)
    prompts = [_prompt(request, llm) for request in requests]
    params = [offline.sampling(request.max_tokens, args) for request in requests]
    # A short request first, so that one-time work is not measured.
    llm.generate(prompts[:1], [offline.sampling(2, args)], use_tqdm=False)
    llm.reset_prefix_cache()
    llm.llm_engine.reset_mm_cache()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=not args.disable_tqdm)
    result = _summarize(llm, outputs, time.perf_counter() - start)
    if num_images := sum(len(request.images) for request in requests):
        result["images_per_request"] = round(num_images / len(requests), 3)
        result["images_per_second"] = round(num_images / result["elapsed_time"], 3)
    keys = ["elapsed_time", "requests_per_second", "output_tokens_per_second", "tokens_per_second"]
    keys += ["images_per_request", "images_per_second"]
    rows = [(key.replace("_", " "), result[key]) for key in keys if key in result]
    report.emit(result, rows, args.output_json)


def _make_requests(llm: "LLM", dataset: DatasetArgs) -> list[BenchRequest]:
    config = llm.llm_engine.vllm_config
    if dataset.is_random:
        vocab_size = config.model.resolved_arch.vocab_size
        ids: Sequence[int] = range(min(16, vocab_size - 1), vocab_size)
        if dataset.images is not None:
            _check_reads_images(llm)
            ids = ordinary_ids(llm.get_tokenizer())  # ordinary_ids leaves out image placeholders
        return with_images(dataset, random_requests(dataset, ids))
    return file_requests(dataset, llm.get_tokenizer(), config.scheduler.max_model_len)


def _check_reads_images(llm: "LLM") -> None:
    media = llm.llm_engine.input_processor.media
    if not media.limits.get("image"):
        raise ConfigError(
            "--dataset-name random-mm needs a model that reads images: choose random, or another "
            "model"
        )


def _prompt(request: BenchRequest, llm: "LLM") -> Any:
    """Return the prompt of a request. Images come before its tokens."""
    if not isinstance(request.prompt, list):
        return request.prompt
    if not request.images:
        return {"prompt_token_ids": request.prompt}
    family = llm.llm_engine.input_processor.media.family
    assert family is not None
    text = family.text_of("image").strip() * len(request.images)
    ids = llm.get_tokenizer()(text, add_special_tokens=False)["input_ids"]
    return {
        "prompt_token_ids": [*ids, *request.prompt],
        "multi_modal_data": {"image": list(request.images)},
    }


def _summarize(llm: "LLM", outputs: "list[RequestOutput]", elapsed_s: float) -> dict[str, Any]:
    num_input = sum(len(output.prompt_token_ids or ()) for output in outputs)
    num_output = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return {
        "benchmark": "throughput",
        "machine": report.machine() | offline.facts(llm),
        "num_requests": len(outputs),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_num_tokens": num_input + num_output,
        "elapsed_time": round(elapsed_s, 4),
        "requests_per_second": round(len(outputs) / elapsed_s, 3),
        "output_tokens_per_second": round(num_output / elapsed_s, 2),
        "tokens_per_second": round((num_input + num_output) / elapsed_s, 2),
    }
