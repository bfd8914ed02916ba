"""Complete a text with the `openai` client: several outputs, and how likely their tokens were."""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=args.api_key)
    model = client.models.list().data[0].id
    completion = client.completions.create(
        model=model,
        prompt="def read_file(path):",
        max_tokens=24,
        n=2,
        temperature=0.8,
        seed=1,
        logprobs=1,
    )
    for choice in completion.choices:
        print(f"--- {choice.index}: {choice.finish_reason}")
        print(choice.text)
        assert choice.logprobs is not None
        print("first token:", choice.logprobs.tokens[0], choice.logprobs.token_logprobs[0])
    print(completion.usage)


if __name__ == "__main__":
    main()
