"""Show sampling parameters: several samples, seeds, log-probabilities, stop strings."""

from vllm import LLM, SamplingParams

PROMPT = "def parse(text):\n    "


def main() -> None:
    llm = LLM()

    several = SamplingParams(n=3, temperature=1.0, top_k=50, max_tokens=16, seed=1)
    for sample in llm.generate(PROMPT, several)[0].outputs:
        print(f"sample {sample.index}: {sample.text!r}")

    # A seeded request gives the same tokens whatever it is batched with.
    seeded = SamplingParams(temperature=1.0, max_tokens=16, seed=7)
    alone = llm.generate(PROMPT, seeded)[0].outputs[0].token_ids
    crowd = llm.generate([PROMPT, "import re\n", "class Node:"], seeded)[0].outputs[0].token_ids
    print(f"alone and in a crowd the same: {alone == crowd}")

    likely = SamplingParams(temperature=0, max_tokens=3, logprobs=3)
    for position in llm.generate(PROMPT, likely)[0].outputs[0].logprobs or []:
        print({entry.decoded_token: round(entry.logprob, 2) for entry in position.values()})

    until = SamplingParams(temperature=0, max_tokens=64, stop=["\n\n"])
    output = llm.generate(PROMPT, until)[0].outputs[0]
    print(f"ended by {output.finish_reason} ({output.stop_reason!r}): {output.text!r}")


if __name__ == "__main__":
    main()
