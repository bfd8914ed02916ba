"""Decode time with and without drafts from known text, on an editing workload.

The prompt is a text followed by its beginning, so that an answer which goes on with the text
repeats the prompt. Both engines run in turn in one process, in several rounds. One JSON object on
stdout: seconds per round, drafts per token, the share of right ones and the ratio of the medians.
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
    parser.add_argument("--method", default="ngram", choices=("ngram", "suffix"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--random", action="store_true", help="a workload that repeats nothing")
    args = parser.parse_args()
    common = {"max_model_len": 1024, "enable_prefix_caching": False}
    common |= {"load_format": args.load_format}
    engines = {
        "none": LLM(args.model, **common),
        args.method: LLM(args.model, speculative_config={"method": args.method}, **common),
    }
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0, ignore_eos=True)
    if args.random:
        params.temperature, params.seed = 1.5, 7
    prompts = [TEXT[i : i + 600] + "\n\n" + TEXT[i : i + 200] for i in range(args.batch)]
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
