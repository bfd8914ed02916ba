r"""Compare the speed of several checkpoints or engines: tokens/s of decodes and prompts.

    python -m benchmarks.bench_checkpoints --engine int4=MODEL,quantization=int4 \
        --engine gptq=MODEL-GPTQ --engine fp8=MODEL-FP8 [--peer NAME='COMMAND'] [--rounds 5]

Every engine is a process (or several), and all of them are in memory at a time. They run one after
another within a round, because a shared machine changes its speed from one second to the next.
Ratios are relative to the first engine in the same round, and every second round runs the engines
in reverse order. While one runs, the others are stopped (SIGSTOP), since their threads may wait in
loops. If the memory rate changes within seconds, use many short runs: `--run "decode, batch 1"
--scale 0.125 --rounds 100` compares 7 tokens of one engine with 7 of the next within a second.

A run is one batch of random prompts that starts at once: `prefill` is tokens of prompts until all
of them have their first output, `decode` is what follows.

Without `--run` the first three of `RUNS` are measured. "shared prefix" needs
`enable-prefix-caching` among the flags of an engine, and "64 requests" needs `max-num-seqs=64`.

`--peer` is any other command that speaks the same protocol: it prints the line `ready`, then reads
lines with a JSON object (`batch`, `input_len`, `shared_len`, `output_len`, `vocab_size`, `seed`)
from standard input, and answers each with a line that has an object with `first_s` and `last_s`:
seconds from the start of the run to the first token of the last row, and to the last token. Other
lines are ignored. The first `shared_len` tokens of all prompts of a batch are the same. Prints one
JSON object on standard output and what is measured on standard error.
"""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.common import random_prompts, report
from vllm import LLMEngine, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind

READY = "ready"


@dataclass(frozen=True)
class Run:
    """One batch.

    Attributes:
        batch: requests.
        input_len: tokens of each prompt.
        output_len: tokens of each output. With 1, the rate counts prompt tokens.
        shared_len: tokens at the start of the prompts that all of them share.
        is_whole: the rate counts all output tokens from the start of the batch to its end, instead
            of only the tokens after the first.
    """

    batch: int
    input_len: int
    output_len: int
    shared_len: int = 0
    is_whole: bool = False

    def scaled(self, scale: float) -> "Run":
        """Return the same batch with lengths multiplied by `scale`."""
        sizes = (self.input_len, self.output_len, self.shared_len)
        lengths = [size if size < 2 else max(2, round(size * scale)) for size in sizes]
        return replace(self, input_len=lengths[0], output_len=lengths[1], shared_len=lengths[2])

    def question(self, vocab_size: int, seed: int) -> dict[str, int]:
        """Return the line that is sent to an engine, as an object."""
        line = {**asdict(self), "vocab_size": vocab_size, "seed": seed}
        del line["is_whole"]
        return line

    def rate(self, result: dict[str, float]) -> float:
        """Return tokens per second."""
        if self.output_len == 1:
            return self.batch * self.input_len / result["first_s"]
        if self.is_whole:
            return self.batch * self.output_len / result["last_s"]
        return self.batch * (self.output_len - 1) / (result["last_s"] - result["first_s"])


RUNS: dict[str, Run] = {
    "decode, batch 1": Run(1, 128, 64),
    "decode, batch 16": Run(16, 32, 32),
    "prefill": Run(1, 512, 1),
    "16 requests": Run(16, 128, 64, is_whole=True),
    "prompt of 1,024": Run(1, 1024, 1),
    "shared prefix": Run(8, 832, 16, shared_len=768, is_whole=True),
    "64 requests": Run(64, 32, 64, is_whole=True),
}
DEFAULT_RUNS = ("decode, batch 1", "decode, batch 16", "prefill")
WARM_UP_SCALE = 0.25
"""Of the lengths of the first round, which does not count."""


class Engine:
    """A process that runs batches when it is asked to."""

    def __init__(self, name: str, command: list[str]):
        self.name = name
        start = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # its process group is stopped and continued
        )
        while self._line().strip() != READY:
            pass
        self.load_s = time.perf_counter() - start
        self._signal(signal.SIGSTOP)

    def run(self, question: dict[str, int]) -> dict[str, float]:
        """Run a batch; return {"first_s", "last_s"}."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        print(json.dumps(question), file=self._process.stdin, flush=True)
        while not (line := self._line()).startswith("{"):
            pass
        self._signal(signal.SIGSTOP)
        return json.loads(line)

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended with status {self._process.wait()}")
        return line

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
            self._process.wait()


def serve(flags: list[str]) -> None:
    """Run the process of an engine of this package."""
    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser)
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(flags)))
    print(READY, flush=True)
    for line in sys.stdin:
        print(json.dumps(run_batch(engine, **json.loads(line))), flush=True)


def run_batch(
    engine: LLMEngine,
    batch: int,
    input_len: int,
    shared_len: int,
    output_len: int,
    vocab_size: int,
    seed: int,
) -> dict[str, float]:
    params = SamplingParams(
        temperature=0,
        max_tokens=output_len,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    prompts = random_prompts(batch, input_len, vocab_size, seed)
    for prompt in prompts:
        prompt["prompt_token_ids"][:shared_len] = prompts[0]["prompt_token_ids"][:shared_len]
    without_token = {str(row) for row in range(batch)}
    first = 0.0
    start = time.perf_counter()
    for row, prompt in enumerate(prompts):
        engine.add_request(str(row), prompt, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if without_token:
            without_token -= {out.request_id for out in outputs if out.outputs[0].token_ids}
            first = time.perf_counter() - start
    return {"first_s": first, "last_s": time.perf_counter() - start}


def commands(args: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Return the name and the command of each engine."""
    for is_peer, text in args.engines:
        name, equals, what = text.partition("=")
        if not equals:
            sys.exit(f"{text!r} names no engine; write NAME=..., such as int4=MODEL")
        if is_peer:
            yield name, shlex.split(what)
            continue
        model, *settings = what.split(",")
        flags = [part for s in settings for part in _flag(*s.partition("=")[::2])]
        own = [sys.executable, "-m", "benchmarks.bench_checkpoints", "--serve", "--model", model]
        fixed = ["--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "16"]
        yield name, [*own, *fixed, "--no-enable-prefix-caching", *flags]


def _flag(name: str, value: str) -> list[str]:
    flag = "--" + name.replace("_", "-")
    return [flag, value] if value else [flag]


def spread(values: list[float], digits: int) -> dict[str, float]:
    """Return median, quartiles, smallest and largest value."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    if len(values) > 1:
        found["quarter"], _, found["three_quarters"] = statistics.quantiles(values)
    return {name: round(value, digits) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for flag, is_peer, text in (
        ("--engine", False, "NAME=MODEL[,flag=value...]: an engine of this package"),
        ("--peer", True, "NAME=COMMAND: another engine"),
    ):
        parser.add_argument(
            flag,
            dest="engines",
            action="append",
            type=lambda text, is_peer=is_peer: (is_peer, text),
            help=text,
        )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--run", choices=RUNS, action="append", help="default: the first three")
    parser.add_argument("--vocab-size", type=int, default=4096, help="prompts have ids below it")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths, for a quick look")
    args = parser.parse_args()
    if not args.engines:
        parser.error("name engines with --engine or --peer; the first is what others compare with")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leave no stopped engines
    engines: list[Engine] = []
    try:
        for name, command in commands(args):
            engines.append(Engine(name, command))
            print(f"{name}: loaded in {engines[-1].load_s:.1f} s", file=sys.stderr, flush=True)
        results = measure(engines, args)
    finally:
        for engine in engines:
            engine.stop()
    runs = {title: asdict(RUNS[title]) for title in args.run or DEFAULT_RUNS}
    settings = {"rounds": args.rounds, "runs": runs, "scale": args.scale, "base": engines[0].name}
    report("checkpoints", settings, results)


def measure(engines: list[Engine], args: argparse.Namespace) -> list[dict[str, Any]]:
    rates: dict[tuple[str, str], list[float]] = {}
    for number in range(args.rounds + 1):
        for title in args.run or DEFAULT_RUNS:
            run = RUNS[title].scaled(args.scale * (1 if number else WARM_UP_SCALE))
            question = run.question(args.vocab_size, seed=number)
            for engine in engines[:: -1 if number % 2 else 1]:
                value = run.rate(engine.run(question))
                if number:
                    rates.setdefault((title, engine.name), []).append(value)
        print(f"round {number} of {args.rounds}", file=sys.stderr, flush=True)
    return [
        {
            "run": title,
            "engine": name,
            "tokens_per_s": spread(values, 2),
            "ratio": spread(
                [a / b for a, b in zip(values, rates[title, engines[0].name], strict=True)], 3
            ),
        }
        for (title, name), values in rates.items()
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
    else:
        main()
