"""Time the parts of an engine step on the host, apart from the forward pass.

Every part of a steady decode step is timed where it happens: schedule, batch update, the forward
pass, scheduler update, output processing. If the CPU runs a step of decodes in one call, "model"
is that call, with its inputs and the sampling in it; elsewhere (`--logprobs`) input building,
sampling and collection are parts of their own.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from common import fixed_length, make_llm, make_parser, percentiles, random_prompts, report


class Timers:
    """Stores the seconds of every call, by part."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = defaultdict(list)

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Time every call of `owner.name` as `part`."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.parts[part].append(time.perf_counter() - start)

        setattr(owner, name, timed)


def measure(num_seqs: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the median and the tail of a step of `num_seqs` running decodes."""
    args.max_num_seqs = max(args.num_seqs)
    args.async_scheduling = False  # parts are timed where they happen, one after the other
    engine = make_llm(args).llm_engine
    core = engine.engine_core
    runner = core.executor._worker.runner
    vocab_size = engine.vllm_config.model.resolved_arch.vocab_size
    for index, prompt in enumerate(random_prompts(num_seqs, args.input_len, vocab_size)):
        params = fixed_length(args.num_steps + 32)
        params.logprobs = args.logprobs
        engine.add_request(str(index), prompt, params)
    for _ in range(16):  # compute all prompts, and warm the caches
        engine.step()

    timers = Timers()
    fused = runner.launches.decode_steps.without
    for owner, name, part in (
        (engine, "step", "step"),
        (core.scheduler, "schedule", "schedule"),
        (core.scheduler, "update", "update"),
        (runner.batch, "update", "batch_update"),
        (runner.launches, "build", "build_input"),
        (runner.launches, "run", "forward"),
        (runner.model, "compute_logits", "logits"),
        (runner.tokens, "sampler", "sample"),
        (runner, "_collect", "collect"),
        (engine.output_processor, "process", "output"),
    ):
        timers.wrap(owner, name, part)
    if fused is not None and args.logprobs is None:
        timers.wrap(fused, "_step", "model")
    for _ in range(args.num_steps):
        engine.step()
    parts = timers.parts
    device = parts["model"]
    if not device:
        device = [a + b for a, b in zip(parts["forward"], parts["logits"], strict=True)]
    host = [step - d for step, d in zip(parts["step"], device, strict=True)]
    return {
        "num_seqs": num_seqs,
        "host_ms": percentiles([x * 1e3 for x in host]),
        "forward_ms": percentiles([x * 1e3 for x in device]),
        "parts_us": {
            name: round(percentiles(v, 9)["p50"] * 1e6, 1) for name, v in parts.items() if v
        },
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--num-steps", type=int, default=100)
    parser.add_argument("--logprobs", type=int, help="of each request: steps in several calls")
    args = parser.parse_args()
    results = [measure(num_seqs, args) for num_seqs in args.num_seqs]
    report("step", {"steps": args.num_steps, "input_len": args.input_len}, results)


if __name__ == "__main__":
    main()
