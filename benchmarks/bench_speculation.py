"""Measure the decode time with and without drafts, on an editing workload.

The prompt is a text followed by its beginning, so that an answer that continues the text repeats
the prompt. Both engines run alternately in one process, in several rounds. One JSON object on
stdout: seconds per round, drafts per token, the fraction of accepted drafts, and the ratio of the
medians.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from vllm import LLM, SamplingParams

TEXT = Path(__file__).read_text(encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="not set: the bundled one")
    parser.add_argument("--method", default="ngram", choices=("ngram", "suffix", "draft_model"))
    parser.add_argument("--draft-model", default=None, help="of the method draft_model")
    parser.add_argument("--num-drafts", type=int, default=0, help="0: the default of the method")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--random", action="store_true", help="a workload that repeats nothing")
    parser.add_argument(
        "--plain", action="store_true", help="texts that the model continues, no editing"
    )
    args = parser.parse_args()
    common = {"max_model_len": 1024, "enable_prefix_caching": False}
    common |= {"load_format": args.load_format}
    speculative = {"method": args.method, "num_speculative_tokens": args.num_drafts}
    if args.draft_model is not None:
        speculative["model"] = args.draft_model
    engines = {
        "none": LLM(args.model, **common),
        args.method: LLM(args.model, speculative_config=speculative, **common),
    }
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature)
    params.seed, params.ignore_eos = 7, True
    if args.random:
        params.temperature = 1.5
    prompts = [TEXT[i : i + 600] + "\n\n" + TEXT[i : i + 200] for i in range(args.batch)]
    if args.plain:
        prompts = [TEXT[i : i + 600] for i in range(0, 20 * args.batch, 20)]
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    outputs = {}
    for _ in range(args.rounds + 1):
        for name, llm in engines.items():
            start = time.perf_counter()
            found = llm.generate(prompts, params, use_tqdm=False)
            seconds[name].append(time.perf_counter() - start)
            outputs[name] = [list(output.outputs[0].token_ids) for output in found]
    timed = {name: values[1:] for name, values in seconds.items()}
    plain, drafted = (statistics.median(values) for values in timed.values())
    drafts = engines[args.method].llm_engine.engine_core.stats().drafts
    report = {
        "seconds": {name: [round(value, 4) for value in values] for name, values in timed.items()},
        "ratio": round(plain / drafted, 3),
        "drafts_per_token": round(
            drafts.num_draft_tokens / ((args.rounds + 1) * args.batch * args.max_tokens), 3
        ),
        "accepted": round(sum(drafts.accepted) / max(1, drafts.num_draft_tokens), 3),
        "same_tokens": outputs["none"] == outputs[args.method],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
