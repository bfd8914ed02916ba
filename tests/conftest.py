"""Settings of every test process."""

import signal
import threading
from collections.abc import Iterator

import pytest
import torch

# Test processes run side by side: more threads than cores would only wait for each other.
torch.set_num_threads(1)

# A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that.
is_main = threading.current_thread() is threading.main_thread()
if is_main and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["avx512_bf16", "avx512_vnni", "avx512", "avx2", "base"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The C++ kernels run on this instruction set; skipped where there is none."""
    from vllm.ops.cpu_library import load_cpu_kernels

    library = load_cpu_kernels()
    if library is None:
        pytest.skip("the C++ kernels are not built")
    best = library.vllm_cpu_isa()
    if not library.vllm_cpu_set_isa(request.param.encode()):
        pytest.skip(f"no {request.param} in this build or on this processor")
    yield request.param
    library.vllm_cpu_set_isa(best)


@pytest.fixture
def restore_threads() -> Iterator[None]:
    """The test may change the number of threads."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
