"""Hold two conversations at once, through the model's chat template."""

import argparse

from vllm import LLM, SamplingParams

CONVERSATIONS = [
    [{"role": "user", "content": "What does os.path.join do?"}],
    [
        {"role": "system", "content": "You explain Python's standard library."},
        {"role": "user", "content": "What does shutil.copytree do?"},
    ],
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or Hugging Face name")
    args = parser.parse_args()

    llm = LLM(model=args.model) if args.model else LLM()
    outputs = llm.chat(CONVERSATIONS, SamplingParams(temperature=0, max_tokens=64))
    for conversation, output in zip(CONVERSATIONS, outputs, strict=True):
        print(f"user: {conversation[-1]['content']}\nassistant: {output.outputs[0].text}\n")


if __name__ == "__main__":
    main()
