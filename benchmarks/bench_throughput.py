"""Offline throughput: all requests are there at the start; fixed lengths, random prompts."""

import time

from common import fixed_length, make_llm, make_parser, random_prompts, report


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--num-runs", type=int, default=3, help="the median run counts")
    args = parser.parse_args()

    llm = make_llm(args)
    vocab_size = llm.llm_engine.vllm_config.model.resolved_arch.vocab_size
    params = fixed_length(args.output_len)
    llm.generate(random_prompts(2, args.input_len, vocab_size, seed=-1), params, use_tqdm=False)
    elapsed = []
    for run in range(args.num_runs):
        prompts = random_prompts(args.num_prompts, args.input_len, vocab_size, seed=run)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        elapsed.append(time.perf_counter() - start)
        assert all(len(o.outputs[0].token_ids) == args.output_len for o in outputs)
    median_s = sorted(elapsed)[len(elapsed) // 2]
    num_output = args.num_prompts * args.output_len
    num_total = num_output + args.num_prompts * args.input_len
    report(
        "throughput",
        {
            "model": llm.llm_engine.vllm_config.model.model,
            "num_prompts": args.num_prompts,
            "input_len": args.input_len,
            "output_len": args.output_len,
        },
        {
            "elapsed_s": round(median_s, 4),
            "requests_per_s": round(args.num_prompts / median_s, 2),
            "output_tokens_per_s": round(num_output / median_s, 1),
            "total_tokens_per_s": round(num_total / median_s, 1),
            "all_runs_s": [round(x, 4) for x in elapsed],
        },
    )


if __name__ == "__main__":
    main()
