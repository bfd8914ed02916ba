"""Report the processor time of tests, child processes included: a plug-in of pytest.

python -m pytest -p tools.test_time tests/core

Wall time depends on what else runs on the machine; processor time hardly does. Run it without `-n`.
The report has the files, tests and shared fixtures with the most seconds. Processes that have left
their parent, such as daemons, are not counted.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NUM_ROWS = 20
"""Number of rows of each table."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s() -> float:
    """Return the processor time of this process and of all processes that it has started."""
    times = os.times()
    total = time.process_time() + times.children_user + times.children_system
    pending = _children(str(os.getpid()))
    while pending:
        pid = pending.pop()
        pending += _children(pid)
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # the process has ended
            continue
        # After the name, which may contain anything: times of the process, then of its children.
        total += sum(map(int, text.rpartition(")")[2].split()[11:15])) / _TICKS_PER_S
    return total


def _children(pid: str) -> list[str]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [child for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # the process or one of its threads has ended
        return []


class CpuTimes:
    """Measure the processor time of tests and fixtures.

    Attributes:
        tests: seconds of each test, by its id.
        fixtures: seconds of each fixture that several tests share, without fixtures that it uses.
    """

    def __init__(self) -> None:
        self.tests: Counter[str] = Counter()
        self.fixtures: Counter[str] = Counter()
        self._inner: list[float] = []

    @contextmanager
    def measured(self, table: Counter[str], name: str) -> Iterator[None]:
        """Add the processor time in this context to a table, fixtures without those inside."""
        before = cpu_s()
        self._inner.append(0.0)
        yield
        spent = cpu_s() - before
        table[name] += spent - (self._inner.pop() if table is self.fixtures else 0)
        if self._inner:
            self._inner[-1] += spent

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure a test with its set-up and its end."""
        self._inner.clear()
        with self.measured(self.tests, item.nodeid):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: "pytest.FixtureDef[object]", request: pytest.FixtureRequest
    ) -> Iterator[None]:
        """Measure a fixture that outlives a test."""
        if fixturedef.scope == "function":
            return (yield)
        with self.measured(self.fixtures, f"{fixturedef.argname} of {fixturedef.baseid or '.'}"):
            return (yield)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the tables."""
        files: Counter[str] = Counter()
        for name, seconds in self.tests.items():
            files[name.partition("::")[0]] += seconds
        terminalreporter.section(f"processor time: {sum(files.values()):.1f} s in tests")
        for title, table in (("files", files), ("tests", self.tests), ("fixtures", self.fixtures)):
            terminalreporter.write_line(f"{title}:")
            for name, seconds in table.most_common(NUM_ROWS):
                terminalreporter.write_line(f"{seconds:8.2f} s  {name[:120]}")


def pytest_configure(config: pytest.Config) -> None:
    """Switch the measurement on."""
    config.pluginmanager.register(CpuTimes(), "cpu-times")
