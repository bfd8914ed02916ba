"""Implement `vllm generate`: complete prompts from the command line, a file or standard input."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.utils import FlexibleArgumentParser
from vllm.utils.arguments import add_number, add_switch, add_text, add_truncation_flags

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

DESCRIPTION = "Complete prompts with a model, without a server."
USAGE = "vllm generate [--model MODEL] --prompt TEXT [flags]"


def add_flags(parser: FlexibleArgumentParser) -> None:
    """Declare the flags of the command."""
    source = parser.add_argument_group("prompts")
    source.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated"
    )
    add_text(
        source,
        "--prompts-file",
        "a file with one prompt per line; - is standard input",
        metavar="FILE",
    )
    add_switch(source, "--chat", "send each prompt as a user message, with the chat template")
    sampling = parser.add_argument_group(
        "sampling", "Defaults come from the model's generation_config.json."
    )
    add_number(sampling, "--max-tokens", "output tokens", 128)
    add_number(sampling, "--temperature", "sampling temperature; 0: greedy", kind=float)
    add_truncation_flags(sampling)
    add_number(sampling, "--n", "outputs per prompt")
    # No --seed: the engine's flag already makes the whole run reproducible.
    sampling.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="stop string, which ends an output; may be repeated",
    )
    add_switch(parser, "--json", "print one JSON object per prompt")
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> None:
    """Generate and print: results on stdout, logs and progress on stderr.

    The last line, with the speed, is also printed to stderr if stdout must contain only JSON.
    """
    prompts = list(_read_prompts(args))
    if not prompts:
        raise ConfigError("there are no prompts: give --prompt TEXT or --prompts-file FILE")
    engine_args = EngineArgs.from_cli_args(args)
    sampling = _read_sampling(args)

    import msgspec

    from vllm import LLM

    llm = LLM(**vars(engine_args))
    sampling_params = msgspec.structs.replace(llm.get_default_sampling_params(), **sampling)
    start = time.perf_counter()
    outputs = _generate(llm, prompts, sampling_params, chat=args.chat)
    elapsed_s = time.perf_counter() - start
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), start=1):
        if args.json:
            sys.stdout.write(_as_json(prompt, output))
        else:
            sys.stdout.write(f"--- {index} of {len(prompts)}\n")
            sys.stdout.write(_as_text(prompt, output, chat=args.chat))
    summary = sys.stderr if args.json else sys.stdout
    summary.write(_summarize(outputs, elapsed_s))


def _read_prompts(args: argparse.Namespace) -> Iterator[str]:
    yield from args.prompt
    if args.prompts_file is None:
        return
    try:
        if args.prompts_file == "-":
            text = sys.stdin.read()
        else:
            with open(args.prompts_file, encoding="utf-8-sig") as file:
                text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read prompts from {args.prompts_file!r}: {error}") from None
    yield from (line for line in text.splitlines() if line.strip())


def _read_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters from the flags. They are checked before the model is
    loaded.
    """
    from vllm import SamplingParams

    names = ("max_tokens", "temperature", "top_p", "top_k", "n", "stop")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    SamplingParams(**given)
    return given


def _generate(
    llm: "LLM", prompts: list[str], sampling_params: "SamplingParams", *, chat: bool
) -> "list[RequestOutput]":
    if not chat:
        return llm.generate(prompts, sampling_params)
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return llm.chat(conversations, sampling_params)


def _as_json(prompt: str, output: "RequestOutput") -> str:
    line: dict[str, Any] = {
        "prompt": prompt,
        "num_prompt_tokens": len(output.prompt_token_ids or ()),
        "outputs": [
            {
                "text": sample.text,
                "num_tokens": len(sample.token_ids),
                "finish_reason": sample.finish_reason,
            }
            for sample in output.outputs
        ],
    }
    return json.dumps(line, ensure_ascii=False) + "\n"


def _as_text(prompt: str, output: "RequestOutput", *, chat: bool) -> str:
    """Return the text to print: an answer below its question, or a completion directly after its
    prompt."""
    gap = "\n\n" if chat else ""
    return "".join(f"{prompt}{gap}{sample.text}\n\n" for sample in output.outputs)


def _summarize(outputs: "list[RequestOutput]", elapsed_s: float) -> str:
    num_prompt = sum(len(output.prompt_token_ids or ()) for output in outputs)
    num_output = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return (
        f"{len(outputs)} prompts, {num_prompt} prompt tokens, {num_output} output tokens "
        f"in {elapsed_s:.2f} s: {num_output / elapsed_s:.1f} tokens/s\n"
    )
