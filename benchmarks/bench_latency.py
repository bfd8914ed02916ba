"""Latency of one batch from its first token in to its last token out; fixed lengths."""

import time

from common import fixed_length, make_llm, make_parser, percentiles, random_prompts, report


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--num-iters-warmup", type=int, default=2)
    args = parser.parse_args()

    llm = make_llm(args)
    vocab_size = llm.llm_engine.vllm_config.model.resolved_arch.vocab_size

    def run(num_tokens: int, seed: int) -> float:
        prompts = random_prompts(args.batch_size, args.input_len, vocab_size, seed)
        start = time.perf_counter()
        llm.generate(prompts, fixed_length(num_tokens), use_tqdm=False)
        return time.perf_counter() - start

    for iteration in range(args.num_iters_warmup):
        run(args.output_len, seed=-1 - iteration)
    # A prompt with a single output token is prefill; what the rest adds is decode.
    first_s = [run(1, seed) for seed in range(args.num_iters)]
    whole_s = [run(args.output_len, 1000 + seed) for seed in range(args.num_iters)]
    decode_s = percentiles(whole_s)["p50"] - percentiles(first_s)["p50"]
    report(
        "latency",
        {
            "model": llm.llm_engine.vllm_config.model.model,
            "batch_size": args.batch_size,
            "input_len": args.input_len,
            "output_len": args.output_len,
        },
        {
            "latency_s": percentiles(whole_s),
            "first_token_s": percentiles(first_s),
            "decode_ms_per_step": round(decode_s / max(1, args.output_len - 1) * 1e3, 3),
        },
    )


if __name__ == "__main__":
    main()
