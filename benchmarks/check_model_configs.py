"""Start the published configs of many models with small sizes, and say which of them run.

    python -m benchmarks.check_model_configs [--names PART ...] [--list]

`model_configs.jsonl` has one config a line, with the keys by which the config.json that a model was
published with differs from others. Sizes are small, and the keys of `BASE` are added where a line
does not have them. A key with the value null in a line is absent, or null, in the published file:
it is left out. Most lines were written from memory, so a key may differ from the published file.
`files` are further files of the folder. Each config is loaded with dummy weights,
and two prompts generate 8 tokens. Prints a JSON object with the number of each result:

    runs        tokens of every prompt
    refused     a ConfigError in one line, which is listed
    fails       anything else, which is listed

Exits with 1 if a config fails.
"""

import argparse
import json
import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import fixed_length
from vllm import LLM
from vllm.errors import ConfigError

CONFIGS = Path(__file__).with_name("model_configs.jsonl")
BASE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "block_size": 16,
    "num_gpu_blocks_override": 32,
    "disable_log_stats": True,
}
PROMPTS = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": list(range(16, 40))}]
NUM_TOKENS = 8


def read_configs() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return config.json and the other files of each model, by its name."""
    found = {}
    for line in CONFIGS.read_text().splitlines():
        given = json.loads(line)
        name, files = given.pop("name"), given.pop("files", {})
        whole: dict[str, Any] = {"architectures": [given.pop("architecture")], "dtype": "bfloat16"}
        if "text_config" in given:
            given["text_config"] = _without_null(BASE | given["text_config"])
            whole |= given
        else:
            whole |= BASE | given
        found[name] = _without_null(whole), files
    return found


def _without_null(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def run(config: dict[str, Any], files: dict[str, Any]) -> tuple[str, str]:
    """Return the result of one config, and the message of its error."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in {"config.json": config, **files}.items():
            (Path(folder) / name).write_text(json.dumps(content))
        try:
            llm = LLM(model=folder, **ENGINE)
            outputs = llm.generate(PROMPTS, fixed_length(NUM_TOKENS), use_tqdm=False)
        except ConfigError as error:
            message = str(error).replace(folder, "MODEL").partition("; supported architectures")[0]
            return ("fails" if "\n" in message else "refused"), message
        except Exception as error:  # a user would see a traceback
            return "fails", f"{type(error).__name__}: {error}"
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    if counts != [NUM_TOKENS] * len(PROMPTS):
        return "fails", f"tokens of the prompts: {counts}"
    return "runs", ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", nargs="*", default=[""], help="only models with one in the name")
    parser.add_argument("--list", action="store_true", help="also list the models that run")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    listed: dict[str, dict[str, str]] = {}
    for name, (config, files) in read_configs().items():
        if any(part.lower() in name.lower() for part in args.names):
            result, message = run(config, files)
            print(f"{result:8} {name}: {message[:160]}".rstrip(": "), file=sys.stderr, flush=True)
            listed.setdefault(result, {})[name] = message
    counts = Counter({result: len(models) for result, models in listed.items()})
    shown = {key: value for key, value in listed.items() if key != "runs" or args.list}
    print(json.dumps({"configs": counts.total(), **counts, "listed": shown}, indent=1))
    return bool(counts["fails"])


if __name__ == "__main__":
    sys.exit(main())
