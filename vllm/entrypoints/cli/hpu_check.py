"""Implement `vllm hpu-check`: check whether the Gaudi card of this machine computes what the engine
needs.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.cost_model.cards import CARDS
from vllm.cost_model.measured import Measured
from vllm.errors import ConfigError
from vllm.platforms.habana.nodes import num_cards
from vllm.platforms.hpu import (
    create_hpu_platform,
    missing_of_card,
    simulated_card,
)
from vllm.utils import FlexibleArgumentParser
from vllm.utils.arguments import add_switch, add_text

if TYPE_CHECKING:
    from vllm.hpu_check import CheckResult
    from vllm.platforms.habana.bridge import HabanaBridge

DESCRIPTION = (
    "Check memory, kernels, attention, a decoder layer, sampling, graphs and compilation of a "
    "Gaudi card, in the mode that PT_HPU_LAZY_MODE gives. Exit code: 0 if no check failed, 1 if a "
    "check failed, 2 if there is no card."
)
_DOCS = "https://docs.habana.ai/en/latest"
VENDOR_IMAGE = (
    "vault.habana.ai/gaudi-docker/1.24.1/ubuntu24.04/habanalabs/"
    "pytorch-upstream-installer-2.11.0:latest"
)
_HOW_TO_INSTALL = f"""\
Driver and firmware, on the host:
  {_DOCS}/Installation_Guide/Driver_Installation.html
The vendor's image has the library; the versions are those of
{_DOCS}/Support_Matrix/Support_Matrix.html, for example:
  docker run -it --runtime=habana -e HABANA_VISIBLE_DEVICES=all \\
    -e OMPI_MCA_btl_vader_single_copy_mechanism=none --cap-add=sys_nice --net=host --ipc=host \\
    {VENDOR_IMAGE}
Without a card, on a simulated one:
  VLLM_HPU_SIM=gaudi2 vllm hpu-check
"""


def add_flags(parser: FlexibleArgumentParser) -> None:
    """Declare the flags of the command."""
    add_switch(parser, "--json", "print one JSON object")
    add_text(
        parser,
        "--save",
        "measure matmuls, memory, graphs and compilations of the card, and the links between "
        "cards, and write their rates for 'vllm plan --measured FILE'",
        metavar="FILE",
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help="folder or Hugging Face name of the model whose decoder layer is checked, with random "
        "weights. Default: the bundled demonstration model",
    )


def run(args: argparse.Namespace) -> int:
    """Check the card, real or simulated, and print a line for each finished check.

    Returns:
        The exit code.
    """
    model = simulated_card()
    if model is None and (missing := missing_of_card()):
        if args.json:
            sys.stdout.write(json.dumps({"card": None, "missing": missing}) + "\n")
        else:
            sys.stderr.write("".join(f"no Gaudi card: {text}\n" for text in missing))
            sys.stderr.write(_HOW_TO_INSTALL)
        return 2

    if args.save is not None:
        _check_target(Path(args.save))  # now, because the checks take minutes

    from vllm.hpu_check import run_checks

    platform = create_hpu_platform()
    results = run_checks(platform, 1 if model else max(1, num_cards()), args.model)
    if args.json:
        done = list(results)
        sys.stdout.write(json.dumps(_as_object(model, done)) + "\n")
    else:
        done = _print_table(model, results)
    if args.save is not None:
        links = {name: rate for result in done for name, rate in result.rates.items()}
        _save(Path(args.save), platform.bridge, links, is_simulated=model is not None)
    return 1 if any(result.status == "fail" for result in done) else 0


def _check_target(path: Path) -> None:
    """Check that `--save` names a file that can be written.

    Raises:
        ConfigError: it does not.
    """
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        reason = "it is a folder" if path.is_dir() else "its folder does not exist or is read-only"
        raise ConfigError(f"--save {path} cannot be written: {reason}. Name another file")


def _save(
    path: Path, bridge: "HabanaBridge", links: Mapping[str, float], *, is_simulated: bool
) -> None:
    """Measure the rates of the card, and write them to a file.

    Args:
        path: path of the file.
        bridge: the card.
        links: rates of its links to other cards, which are measured already.
        is_simulated: nothing runs on hardware.

    Raises:
        ConfigError: the kind of the card is not known, or the file cannot be written.
    """
    from vllm.hpu_check.stopwatch import measure_rates

    cards = [card for card in CARDS if bridge.device_name.lower().startswith(card)]
    if not cards:
        raise ConfigError(
            f"a plan cannot use the rates of a {bridge.device_name}; supported cards: "
            f"{', '.join(CARDS)}"
        )
    Measured(cards[0], is_simulated, {**measure_rates(bridge), **links}).write(path)


def _as_object(model: str | None, results: "list[CheckResult]") -> dict[str, Any]:
    return {
        "card": model or "hpu",
        "is_simulated": model is not None,
        "checks": [asdict(result) for result in results],
        "totals": _totals(results),
    }


def _print_table(model: str | None, results: "Iterable[CheckResult]") -> "list[CheckResult]":
    from vllm.hpu_check import NAMES

    width = max(map(len, NAMES))
    what = f"SIMULATED card ({model}): nothing below ran on hardware" if model else "Gaudi card"
    sys.stdout.write(f"{what}\n{'check':<{width}}  result  detail\n")
    done = []
    for result in results:
        took = f" [{result.elapsed_ms:.0f} ms]"
        sys.stdout.write(f"{result.name:<{width}}  {result.status:<6}  {result.detail}{took}\n")
        if result.status == "fail":
            sys.stdout.write(f"  expected: {result.expected}\n  to do: {result.advice}\n")
        sys.stdout.flush()  # show progress: compiling a check may take minutes
        done.append(result)
    totals = _totals(done)
    elapsed_s = sum(result.elapsed_ms for result in done) / 1e3
    sys.stdout.write(
        f"{totals['pass']} passed, {totals['fail']} failed, {totals['skip']} skipped "
        f"in {elapsed_s:.1f} s\n"
    )
    return done


def _totals(results: "list[CheckResult]") -> dict[str, int]:
    count = Counter(result.status for result in results)
    return {status: count[status] for status in ("pass", "fail", "skip")}
