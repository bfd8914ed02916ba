"""Run openvino-genai as a process to which `bench_image_peer` sends images with a question.

    PYTHON -I benchmarks/peer_openvino_images.py --model FOLDER --converted FOLDER [--threads 2]

PYTHON has openvino-genai and optimum-intel; this package is not needed. The model is converted once
by `optimum-cli`. `bench_image_peer` describes the protocol.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from PIL import Image


def convert(model: str, folder: Path, weights: str) -> None:
    """Write the model in the format of OpenVINO."""
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
    command += ["-m", model, "--task", "image-text-to-text", "--weight-format", weights]
    subprocess.run([*command, str(folder)], check=True, stdout=sys.stderr)


class Peer:
    """Answers greedily, with answers of one length.

    Args:
        folder: folder of the converted model.
        precision: computing precision, as OpenVINO names it: bf16 or f32.
        threads: threads of the model.
    """

    def __init__(self, folder: Path, precision: str, threads: int) -> None:
        hints = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
        self._pipeline = openvino_genai.VLMPipeline(str(folder), "CPU", **hints)

    def run(self, path: str, text: str, num_tokens: int) -> dict[str, float]:
        """Answer a question about the image of a file. The answer has seconds and tokens."""
        settings: Any = openvino_genai.GenerationConfig()
        settings.max_new_tokens, settings.ignore_eos = num_tokens, True
        began, first_s = time.perf_counter(), 0.0

        def note(_: str) -> bool:
            nonlocal first_s
            first_s = first_s or time.perf_counter() - began
            return False

        pixels = openvino.Tensor(np.array(Image.open(path).convert("RGB"))[None])
        found = self._pipeline.generate(
            text, images=[pixels], generation_config=settings, streamer=note
        )
        metrics = found.perf_metrics
        return {
            "whole_s": time.perf_counter() - began,
            "first_s": metrics.get_ttft().mean / 1000,
            "seen_s": first_s,
            "prompt_tokens": metrics.get_num_input_tokens(),
            "tokens": metrics.get_num_generated_tokens(),
        }


def main() -> None:
    """Answer questions until standard input ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder in the format of transformers")
    parser.add_argument("--converted", type=Path, required=True, help="made if it is not there")
    parser.add_argument("--weights", default="fp16", choices=("fp16", "int8"))
    parser.add_argument("--precision", default="bf16", choices=("bf16", "f32"))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if not args.converted.exists():
        convert(args.model, args.converted, args.weights)
    peer = Peer(args.converted, args.precision, args.threads)
    print(f"openvino-genai {openvino_genai.__version__}", file=sys.stderr, flush=True)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(peer.run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
