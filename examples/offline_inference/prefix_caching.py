"""Requests that begin alike share the computation of their beginning."""

import time

from vllm import LLM, SamplingParams

SHARED = "# A module that counts words.\nimport collections\nimport re\n\n" * 20
QUESTIONS = [f"def count_{name}(text):\n" for name in ("words", "lines", "letters", "digits")]


def main() -> None:
    llm = LLM()
    params = SamplingParams(temperature=0, max_tokens=8)
    for attempt in ("cold", "warm"):
        start = time.perf_counter()
        outputs = llm.generate([SHARED + q for q in QUESTIONS], params, use_tqdm=False)
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        total = sum(len(output.prompt_token_ids or ()) for output in outputs)
        elapsed_ms = (time.perf_counter() - start) * 1e3
        print(f"{attempt}: {elapsed_ms:.0f} ms, {cached} of {total} prompt tokens were cached")


if __name__ == "__main__":
    main()
