"""Generate text in processes that torchrun has started, one for each device:

    torchrun --nproc-per-node 2 examples/offline_inference/external_launcher.py

Every process runs this program and gets all outputs. MODEL=NAME chooses another model.
"""

import os

from vllm import LLM, SamplingParams

PROMPTS = ["import os", "def main(", "class Queue:"]


def main() -> None:
    options = {"model": os.environ["MODEL"]} if "MODEL" in os.environ else {}
    llm = LLM(
        tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
        distributed_executor_backend="external_launcher",
        **options,
    )
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    if os.environ["RANK"] == "0":
        for output in outputs:
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
