"""Generate text from a few prompts. Without --model: the bundled demonstration model."""

import argparse

from vllm import LLM, SamplingParams

PROMPTS = [
    "import os\nimport",
    "def read_file(path):\n",
    "class Queue:\n    ",
    '"""Utilities for',
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or Hugging Face name")
    args = parser.parse_args()

    llm = LLM(model=args.model) if args.model else LLM()
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32, seed=0)
    for output in llm.generate(PROMPTS, params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
