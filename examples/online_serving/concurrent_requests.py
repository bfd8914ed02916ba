"""Many requests at a time: the server computes them together."""

import argparse
import asyncio
import time

from openai import AsyncOpenAI


async def run(url: str, api_key: str, num_requests: int) -> None:
    async with AsyncOpenAI(base_url=url, api_key=api_key) as client:
        model = (await client.models.list()).data[0].id

        async def complete(number: int) -> int:
            completion = await client.completions.create(
                model=model, prompt=f"x{number} = ", max_tokens=32, temperature=0
            )
            assert completion.usage is not None
            return completion.usage.completion_tokens

        start = time.perf_counter()
        counts = await asyncio.gather(*(complete(number) for number in range(num_requests)))
        seconds = time.perf_counter() - start
    print(f"{num_requests} requests, {sum(counts)} tokens in {seconds:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--num-requests", type=int, default=32)
    args = parser.parse_args()
    asyncio.run(run(args.url, args.api_key, args.num_requests))


if __name__ == "__main__":
    main()
