"""A core client without a process: messages go through their encoding, steps through `CoreLoop`."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.engine.fakes import FakeEngineCore
from vllm.engine.process import core_supervisor
from vllm.engine.process.core_process import CoreLoop
from vllm.engine.process.wire import (
    CoreFailed,
    CoreProgress,
    CoreReady,
    FromCore,
    ToCore,
    decode_from_core,
    encode,
)
from vllm.errors import EngineDeadError

StatsCore = FakeEngineCore
"""It counts as the real one does."""


class FakeCoreClient:
    """Takes the place of `CoreClient`.

    Attributes:
        core: what it runs; the script of its replies.
        is_held: it computes nothing until released.
        failure: told in place of readiness.
    """

    pid = 1

    def __init__(self, core: StatsCore, failure: CoreFailed | None = None) -> None:
        self.core = core
        self.failure = failure
        self.is_held = False
        self.is_closed = False
        self._inbox: deque[bytes] = deque()
        self._loop = CoreLoop(core, self._receive, self.tell)

    def configure(self, config, models) -> None:
        """The script is all it needs."""

    def attach(
        self, on_message: Callable[[FromCore], None], on_death: Callable[[str], None]
    ) -> None:
        self._on_message, self._on_death = on_message, on_death
        loop = asyncio.get_running_loop()
        loop.call_soon(self.tell, CoreProgress(phase="loading", done=1, total=2))
        if self.failure is not None:
            loop.call_soon(self.tell, self.failure)
            loop.call_soon(self.die, "exit code 2")
        else:
            loop.call_soon(self.tell, CoreReady(stats=self.core.stats()))

    def send(self, message: ToCore) -> None:
        self._inbox.append(encode(message))
        asyncio.get_running_loop().call_soon(self.turn)

    def turn(self) -> None:
        if self.is_closed or self.is_held:
            return
        try:
            self._loop.turn()
        except EngineDeadError as error:
            self.tell(CoreFailed(message=str(error), is_config_error=False))
            self.die("exit code 1")
            return
        if self.core.has_unfinished_requests():
            asyncio.get_running_loop().call_soon(self.turn)

    def die(self, cause: str = "signal 9") -> None:
        if not self.is_closed:
            self._on_death(cause)

    def kill(self) -> None:
        self.is_closed = True

    def close(self) -> None:
        self.kill()

    def _receive(self, wait: bool) -> bytes | None:
        return self._inbox.popleft() if self._inbox else None

    def tell(self, message: FromCore) -> None:
        """Deliver a message of the core."""
        if not self.is_closed:
            self._on_message(decode_from_core(encode(message)))


@contextmanager
def fake_clients(monkeypatch, *clients: FakeCoreClient) -> Iterator[None]:
    """Engines that start inside the block get these, one after the other."""
    left = iter(clients)
    with monkeypatch.context() as patch:
        patch.setattr(core_supervisor, "CoreClient", lambda: next(left))
        yield
