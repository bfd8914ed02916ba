"""Define the settings for the requests of a benchmark, and their flags."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from vllm.entrypoints.bench.random_images import RandomImageArgs, add_image_flags, read_image_flags
from vllm.errors import ConfigError
from vllm.utils.arguments import add_number, add_text, check_smallest

RANDOM_MM = "random-mm"
"""Random prompts with random pictures."""
DATASETS = ("random", RANDOM_MM, "sharegpt", "jsonl", "text")

_BY_SUFFIX = {".json": "sharegpt", ".jsonl": "jsonl"}
_DATASET_NAMES = {"custom": "jsonl"}


@dataclass(frozen=True, kw_only=True)
class DatasetArgs:
    """Settings for the requests to create.

    Raises:
        ConfigError: a value is out of range, or the dataset needs a file and none is given.
    """

    name: str
    path: str | None = None
    num_prompts: int
    input_len: int = 1024
    """Average tokens of a random prompt, without its prefix."""
    output_len: int | None = None
    """Tokens to ask for. None: what the file says, or 128."""
    range_ratio: float = 0.0
    """Random lengths are drawn evenly from `(1 - range_ratio) * length` to `(1 + range_ratio) *
    length`."""
    prefix_len: int = 0
    """Tokens that all random prompts begin with, to use the prefix cache."""
    seed: int = 0
    images: RandomImageArgs | None = None
    """The pictures of random-mm; None: requests have none."""

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            raise ConfigError(f"dataset must be one of {', '.join(DATASETS)}, got {self.name!r}")
        if not self.is_random and self.path is None:
            raise ConfigError(f"dataset {self.name} needs a file: give --dataset-path")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(
                f"random_range_ratio must be at least 0 and below 1, got {self.range_ratio}"
            )
        check_smallest(self, num_prompts=1, input_len=1, prefix_len=0, output_len=1)

    @property
    def is_random(self) -> bool:
        """Whether the prompts are random."""
        return self.name in ("random", RANDOM_MM)


def dataset_of(path: str | None) -> str:
    """Return the dataset type by the name of its file; random without a file."""
    return "random" if path is None else _BY_SUFFIX.get(Path(path).suffix, "text")


def add_dataset_flags(parser: argparse.ArgumentParser, *, input_len: int, num_prompts: int) -> None:
    """Add the flags of `DatasetArgs`."""
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--dataset-name",
        type=lambda name: _DATASET_NAMES.get(name, name),
        choices=DATASETS,
        help=(
            "format of the prompts (default: by the file name: .json is sharegpt, .jsonl is "
            "jsonl, others are text; without a file: random)"
        ),
    )
    add_text(group, "--dataset-path", "file with prompts", metavar="FILE")
    add_number(group, "--num-prompts", "number of requests", num_prompts)
    add_number(
        group, ("--random-input-len", "--input-len"), "number of tokens in each prompt", input_len
    )
    add_number(
        group,
        ("--random-output-len", "--output-len", "--sharegpt-output-len", "--custom-output-len"),
        "number of tokens in each output (default: from the file, or 128)",
    )
    add_number(
        group,
        "--random-range-ratio",
        "lengths of random prompts and outputs differ by up to this fraction from the given length",
        0.0,
    )
    add_number(
        group,
        "--random-prefix-len",
        "number of tokens at the beginning that all random prompts share",
        0,
    )
    add_image_flags(parser)


def read_dataset_flags(args: argparse.Namespace) -> DatasetArgs:
    """Read the flags of `add_dataset_flags`, with the seed of the benchmark.

    Raises:
        ConfigError: a flag is out of range.
    """
    name = args.dataset_name or dataset_of(args.dataset_path)
    return DatasetArgs(
        name=name,
        path=args.dataset_path,
        num_prompts=args.num_prompts,
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        range_ratio=args.random_range_ratio,
        prefix_len=args.random_prefix_len,
        seed=args.seed or 0,
        images=read_image_flags(args) if name == RANDOM_MM else None,
    )
