"""Settings of every test process.

Torch is imported only by the fixtures that use it, because the process that distributes the tests
does not need it.
"""

import functools
import gc
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.isas import ONE_BY_ONE, VECTORS, InstructionSets
from tests.kept_folders import VARIABLE
from vllm.env.bridge import BRIDGE_SETTINGS
from vllm.envs import BRIDGE_SETTINGS_MARK
from vllm.utils.process.process_memory import keep_for_good

# The tests start some hundred processes. Without files of bytecode, each of these processes would
# compile the whole package again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# No garbage collection until the tests are collected, because nearly all objects are kept.
gc.disable()

# No test fails by chance: the generated examples are the same in each run, and a slow machine has
# no time limit. `--hypothesis-profile default` generates new examples.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

# A shell starts its background processes with Ctrl-C ignored, and their children inherit this.
# Restore the usual handler.
is_main = threading.current_thread() is threading.main_thread()
if is_main and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder of the models that all test processes share."""
    if not hasattr(config, "workerinput"):  # with pytest-xdist, its processes get the variable
        folder = tempfile.mkdtemp(prefix="models-of-tests-")
        os.environ[VARIABLE] = folder
        config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Limit the threads of each process. Test processes run in parallel, so more threads than cores
    would only wait for each other.
    """
    if not _runs_tests(session.config):
        gc.enable()
        return
    import torch

    torch.set_num_threads(1)


def _runs_tests(config: pytest.Config) -> bool:
    """Return False for the process that distributes the tests of pytest-xdist."""
    return config.getoption("dist", "no") == "no"


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Leave out the cases of exhaustive tests while they are not run. There are thousands of them,
    and making each one takes as long as running a short test.
    """
    chosen = metafunc.config.getoption("markexpr")
    if " or " in chosen or not chosen.endswith("not exhaustive"):
        return
    parametrize = metafunc.parametrize

    def without_exhaustive(names: Any, values: Iterable[Any], *args: Any, **options: Any) -> None:
        values = list(values)
        kept = [value for value in values if not _is_exhaustive(value)]
        if kept and not isinstance(options.get("ids"), list | tuple):
            values = kept
        parametrize(names, values, *args, **options)

    metafunc.parametrize = without_exhaustive  # type: ignore[method-assign]


def _is_exhaustive(value: Any) -> bool:
    marks = getattr(value, "marks", ())
    return any(getattr(mark, "name", "") == "exhaustive" for mark in marks)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse test names that differ between processes, because processes share the tests by
    name.
    """
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: its name holds an address; give it an id")


def pytest_collection_finish() -> None:
    """Exclude modules and test items from garbage collection. A full collection of them takes half
    a second, and each start on a simulated card requests several.
    """
    keep_for_good(collect=False)  # before the next line, which would start a full collection
    gc.enable()
    gc.set_threshold(20_000, 20, 20)  # fewer collections of the many objects of each test
    _pass_on_what_torch_logs()


def _pass_on_what_torch_logs() -> None:
    """Let log messages of torch reach pytest only through the root logger.

    Sixty loggers of torch do not propagate, so pytest would add a handler to each of them and
    remove it again, six times for each test.
    """
    if "torch" not in sys.modules:  # this is the process that only distributes the tests
        return
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True, scope="session")
def engines_share_the_process_that_compiles_grammars(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """Let all engines use one process for grammars, because its start takes over two seconds."""
    from tests.late_grammars import LATE_GRAMMARS, run_first
    from vllm.structured_output import compiler
    from vllm.utils.process import deadline_worker
    from vllm.utils.process.fork_server import ForkServer

    class KeptServer(ForkServer):
        """Forks for all engines of this process with the same tokenizer; no engine ends it."""

        def close(self) -> None:
            """Do nothing, because the next engine uses this process too."""

    @functools.cache
    def make_kept_server(target: str, setup: bytes) -> ForkServer:
        made = deadline_worker.make_server(target, setup)
        made.__class__ = KeptServer
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "make_server", make_kept_server)
        # Start it with the first grammar: most engines compile none.
        patch.setattr(compiler.GrammarCompiler, "start", lambda *args, **kwargs: None)
        folder = tmp_path_factory.mktemp("late-grammars")
        for name, value in run_first(LATE_GRAMMARS, folder).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(autouse=True, scope="session")
def programs_of_engines_are_forks() -> Iterator[None]:
    """Let engines start their processes as forks of one process, because a new interpreter imports
    modules for two seconds.
    """
    from tests.forked_programs import FORKS, start_programs_with

    start_programs_with(FORKS)
    yield
    FORKS.close()
    start_programs_with(subprocess.Popen)


@pytest.fixture(scope="session")
def preloaded() -> None:
    """Start the process that forks programs before a test that looks for new processes."""
    from tests.forked_programs import FORKS

    FORKS.preload()


@pytest.fixture
def new_interpreters() -> Iterator[None]:
    """Start the processes of engines as users do, in new interpreters."""
    from tests.forked_programs import FORKS, start_programs_with

    start_programs_with(subprocess.Popen)
    yield
    start_programs_with(FORKS)


@pytest.fixture(autouse=True, scope="session")
def simulated_cards_skip_where_torch_has_no_device_for_them() -> Iterator[None]:
    """Skip a test when it makes a simulated card and torch has no device for it, so that tests need
    no mark.
    """
    from gaudi_sim import bridge as sim
    from tests.hpu import HAS_SIMULATED_DEVICE, NO_SIMULATED_DEVICE

    with pytest.MonkeyPatch.context() as patch:
        if not HAS_SIMULATED_DEVICE:
            patch.setattr(sim, "install", lambda *_, **__: pytest.skip(NO_SIMULATED_DEVICE))
        yield


_BRIDGE_VARIABLES = (BRIDGE_SETTINGS_MARK, *(setting.name for setting in BRIDGE_SETTINGS))


@pytest.fixture(autouse=True)
def settings_of_the_bridge_end_with_the_test() -> Iterator[None]:
    """Restore the variables of the bridge, which the process of an engine keeps. The next test
    would take them for settings of the user.
    """
    before = {name: os.environ[name] for name in _BRIDGE_VARIABLES if name in os.environ}
    yield
    for name in _BRIDGE_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(before)


@pytest.fixture(autouse=True)
def handlers_of_signals_end_with_the_test() -> Iterator[None]:
    """Restore signal handlers after each test.

    uvloop does not remove its handlers when a loop is closed, so a later test that sends itself an
    interrupt would not get a KeyboardInterrupt.
    """
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield
    for signum, handler in before.items():
        if is_main and handler is not None and signal.getsignal(signum) != handler:
            signal.signal(signum, handler)


@pytest.fixture(autouse=True)
def same_numbers_in_each_run() -> None:
    """Seed the global generators, for tests that draw without a generator of their own."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    # Seed only the generator of the CPU: simulated cards use it too. `torch.manual_seed` would also
    # format the stack for every other device, for an initialization that never happens; this took a
    # third of the time around a test.
    torch.default_generator.manual_seed(0)


@pytest.fixture
def isas() -> Iterator[InstructionSets]:
    """Return the instruction sets of the C++ kernels, for a test that runs on all of them.

    It saves time if computing the expected values takes longer than the kernels.
    """
    found = InstructionSets()
    yield found
    found.restore()


@pytest.fixture(params=ONE_BY_ONE)
def isa(request: pytest.FixtureRequest, isas: InstructionSets) -> str:
    """Let the C++ kernels run on this instruction set; skip the test if the processor does not have
    it.
    """
    isas.use(request.param)
    return str(request.param)


@pytest.fixture(params=VECTORS)
def vector_isa(request: pytest.FixtureRequest, isas: InstructionSets) -> str:
    """Let the C++ kernels run on an instruction set.

    Only the sets whose kernels without a matmul differ are used.
    """
    isas.use(request.param)
    return str(request.param)


@pytest.fixture
def restore_threads() -> Iterator[None]:
    """Restore the number of torch threads after a test that changes it."""
    import torch

    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let an engine without a model run the first two layers of the bundled model.

    A warm-up of a simulated card takes time for each layer, and what most tests prove of it does
    not depend on how many layers there are.
    """
    from tests.tiny_models import make_short_bundled_model
    from vllm.assets import BUNDLED_MODEL
    from vllm.engine.resolve import config

    folder = make_short_bundled_model(tmp_path_factory.mktemp("short") / BUNDLED_MODEL.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "BUNDLED_MODEL", folder)
        yield


@pytest.fixture
def all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine without a model run the whole bundled model in a module with `two_layers`."""
    from vllm.assets import BUNDLED_MODEL
    from vllm.engine.resolve import config

    monkeypatch.setattr(config, "BUNDLED_MODEL", BUNDLED_MODEL)


@pytest.fixture(scope="module")
def plans_removed() -> Iterator[None]:
    """Close the process group of planned ranks afterwards, and restore a variable of torch."""
    import torch

    name = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    before = os.environ.get(name)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if before is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = before
