"""Check the card itself: its name and versions, its memory, and copies to and from it."""

import importlib
import warnings
from importlib.metadata import PackageNotFoundError, version

import torch

from vllm.hpu_check.check import Outcome
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.platforms.habana.versions import driver_version
from vllm.utils.triton_range import triton_fits, triton_range

_COMPILER = "torch._inductor.freezing"
"""Module that the bridge's compiler imports from torch, and with it triton."""
_MIB = 2**20
_ALLOCATION_MIB = 256


def describe(bridge: HabanaBridge) -> Outcome:
    """Return the names and versions of the card and its software."""
    mode = "lazy" if bridge.is_lazy else "eager"
    try:
        plugin = version("habana-torch-plugin")
    except PackageNotFoundError:
        plugin = "none"
    driver = driver_version() or "unknown"
    return Outcome(
        "pass",
        f"{bridge.device_name}, {mode} mode, torch {torch.__version__}, "
        f"habana-torch-plugin {plugin}, driver {driver}",
    )


def check_triton() -> Outcome:
    """Check that torch's compiler can be imported, which fails if triton belongs to another torch
    version.
    """
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    found = f"torch {torch.__version__}, triton {triton}"
    wanted = triton_range(torch.__version__)
    advice = (
        f"install 'triton{wanted}'"
        if wanted
        else ("install the version of triton that this torch needs")
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own deprecated names
            importlib.import_module(_COMPILER)
    except ImportError as error:
        return Outcome("fail", f"{found}: torch.compile cannot start ({error}); {advice}")
    if triton != "none" and not triton_fits(triton, torch.__version__):
        return Outcome(
            "fail", f"{found}: this triton belongs to a different version of torch; {advice}"
        )
    return Outcome("pass", found)


def check_memory(bridge: HabanaBridge) -> Outcome:
    """Check that allocated memory is subtracted from the free memory, and returned when it is
    freed.
    """
    before = bridge.memory_info()
    block = bridge.zeros((_ALLOCATION_MIB * _MIB,), torch.int8)
    taken_mib = (before.free_bytes - bridge.memory_info().free_bytes) / _MIB
    del block
    lost_mib = (before.free_bytes - bridge.memory_info().free_bytes) / _MIB
    figures = f"{before.free_bytes / 2**30:.2f} of {before.total_bytes / 2**30:.2f} GiB free"
    # The card's memory pool may round up, so only a lower limit is checked.
    if taken_mib < _ALLOCATION_MIB or lost_mib > 1:
        return Outcome(
            "fail",
            f"{figures}; an allocation of {_ALLOCATION_MIB} MiB took {taken_mib:.1f} MiB, and "
            f"{lost_mib:.1f} MiB of it were not freed",
        )
    return Outcome("pass", f"{figures}; {_ALLOCATION_MIB} MiB allocated and freed again")


def check_host_copies(bridge: HabanaBridge) -> Outcome:
    """Check that data copied to the card is returned unchanged, with and without waiting."""
    integers = torch.randint(-(2**31), 2**31, (1000,))
    samples = [torch.randn(1000).to(dtype) for dtype in (torch.float32, torch.bfloat16)]
    samples += [integers, integers.int(), integers.to(torch.uint8), integers > 0]
    for sample in samples:
        on_card = sample.to(bridge.device)
        later = on_card.to("cpu", non_blocking=True)
        bridge.synchronize()
        for how, back in (("waiting", on_card.cpu()), ("not waiting", later)):
            if back.dtype != sample.dtype or not torch.equal(back, sample):
                return Outcome(
                    "fail",
                    f"{sample.dtype} values differ after a copy to the card and back ({how})",
                )
    return Outcome("pass", f"{len(samples)} dtypes, copied with and without waiting")


def check_index_types(bridge: HabanaBridge) -> Outcome:
    """Check reads and writes of a bfloat16 cache by int32 and int64 indices, as attention uses
    them.

    An index may be read several times. An index that is never read may be written several times.
    """
    cache, rows = torch.randn(8, 3, 16).bfloat16(), torch.randn(4, 3, 16).bfloat16()
    reads, writes = torch.tensor([7, 0, 7, 3, 0]), torch.tensor([0, 5, 0, 2])
    want = cache.clone()
    want[[5, 2]] = rows[[1, 3]]
    on_card, new = cache.to(bridge.device), rows.to(bridge.device)
    for dtype in (torch.int32, torch.int64):
        read = on_card.index_select(0, reads.to(bridge.device, dtype)).cpu()
        if not torch.equal(read, cache[reads]):
            return Outcome("fail", f"index_select with {dtype} read wrong rows")
    # Launches have slots as int32, which become int64 on the card.
    on_card.index_copy_(0, writes.to(bridge.device, torch.int32).long(), new)
    written = on_card.cpu()
    if not torch.equal(written[1:], want[1:]):
        return Outcome("fail", "index_copy_ wrote wrong rows")
    if not any(torch.equal(written[0], rows[i]) for i in (0, 2)):
        return Outcome("fail", "index_copy_ of a repeated index wrote neither of its rows")
    return Outcome("pass", "int32 and int64 indices of bfloat16 rows")
