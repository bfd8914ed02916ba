"""Check the collectives: one process for each card, and exchanges between all of them."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from vllm.distributed import CardLink, Link, RankLayout, TorchCollectives, TPGroup
from vllm.hpu_check.check import Outcome
from vllm.hpu_check.stopwatch import measure_links
from vllm.platforms.hpu import create_hpu_platform
from vllm.utils.process.child_process import describe_exit

TIMEOUT_S = 120.0
"""The first collective connects the cards, which takes seconds."""
RANK_PROGRAM = f"import sys; from {__name__} import exchange; exchange(*sys.argv[1:])"


def check_collectives(num_cards: int) -> Outcome:
    """Check sums and gathers over all cards, and sends from each card to the next. None of the
    cards may be open in this process.
    """
    if num_cards < 2:
        return Outcome("skip", "there is one card")
    with TemporaryDirectory() as name:
        folder = Path(name)
        processes = [_start(rank, num_cards, folder) for rank in range(num_cards)]
        try:
            _wait(processes)
        finally:
            codes = [process.poll() for process in processes]
            for process in processes:
                process.kill()
                process.wait()
        for rank, code in enumerate(codes):
            if code:
                lines = _errors(folder, rank).read_text().strip().splitlines()
                reason = lines[-1] if lines else describe_exit(code)
                return Outcome("fail", f"rank {rank} of {num_cards}: {reason}")
        if None in codes:
            return Outcome("fail", f"rank {codes.index(None)} of {num_cards}: no answer")
        rates = json.loads(rates_file(str(folder / "store")).read_text("utf-8"))
    return Outcome("pass", f"sum, gather and send over {num_cards} cards", rates)


def exchange(rank_text: str, world_size_text: str, store: str) -> None:
    """Run the program of one rank. The arguments are strings from a command line.

    The first rank writes the rates of the links to a file next to `store`.

    Args:
        rank_text: rank of this process.
        world_size_text: number of ranks.
        store: path of a file through which the ranks connect; it does not exist yet.

    Raises:
        RuntimeError: a result is wrong.
    """
    rank, world_size = int(rank_text), int(world_size_text)
    platform = create_hpu_platform()
    bridge, before = platform.bridge, platform.before_collective
    torch.distributed.init_process_group(
        bridge.collectives_backend, init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    group = TPGroup(rank, world_size, TorchCollectives(world_size, before=before))
    ranks = torch.arange(world_size).float()
    with torch.inference_mode():
        mine = torch.full((64,), float(rank)).to(bridge.device)
        around = RankLayout(pipeline_size=world_size).stages_around(rank)
        link = CardLink(rank, *around, before=before)
        link.connect(bridge.device)
        send_on(link, mine, rank, world_size)
        # `cpu()` waits, so that no card leaves before all have received.
        gathered = group.all_gather(mine).cpu()
        summed = group.all_reduce(mine).cpu()
        link.close()
        rates = measure_links(bridge, group)
        if rank == 0:
            rates_file(store).write_text(json.dumps(rates), "utf-8")
    torch.distributed.destroy_process_group()
    if not torch.equal(gathered, ranks.repeat_interleave(64)):
        raise RuntimeError(
            f"the all-gather over {world_size} cards must return the data of each, got "
            f"{gathered[::64].tolist()}"
        )
    if not torch.equal(summed, ranks.sum().expand(64)):
        raise RuntimeError(
            f"the sum over {world_size} cards must be {ranks.sum().item()}, got {summed[0].item()}"
        )


def send_on(link: Link, mine: torch.Tensor, rank: int, world_size: int) -> None:
    """Send to the next card, as the stages of a pipeline do, and check what arrives.

    Args:
        link: link to the cards before and after.
        mine: [N], filled with this rank.
        rank: rank of this process.
        world_size: number of ranks.

    Raises:
        RuntimeError: the received value is not the rank of the card before.
    """
    if rank < world_size - 1:
        link.send(mine)
    if rank > 0:
        came = torch.zeros_like(mine)
        link.receive(came)
        first, last = came[0].item(), came[-1].item()
        if not first == last == rank - 1:
            raise RuntimeError(
                f"card {rank} must receive the data of card {rank - 1}, got {first} to {last}"
            )


def _start(rank: int, num_cards: int, folder: Path) -> "subprocess.Popen[bytes]":
    # The bridge reads the position of a process among the cards from these variables.
    place = [f"RANK={rank}", f"LOCAL_RANK={rank}", f"WORLD_SIZE={num_cards}"]
    arguments = [str(rank), str(num_cards), str(folder / "store")]
    with _errors(folder, rank).open("wb") as errors:
        return subprocess.Popen(
            ["env", *place, sys.executable, "-c", RANK_PROGRAM, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )


def rates_file(store: str) -> Path:
    """Return the file in which the first rank writes the rates of the links."""
    return Path(f"{store}-rates.json")


def _errors(folder: Path, rank: int) -> Path:
    return folder / f"errors-{rank}"


def _wait(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    """Wait until all processes have exited, one has failed, or the time is up."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return
        time.sleep(0.05)
