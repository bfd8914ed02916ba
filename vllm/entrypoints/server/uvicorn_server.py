"""Run the HTTP server and the lifecycle of the process: bind, serve, start the engine, drain, exit.

After a first SIGTERM or Ctrl-C, running requests may finish, for at most `shutdown_timeout`; a
second one ends the process at once. When the engine dies, its requests get an error and the process
exits.
"""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop

from vllm.entrypoints.pages.web_page import page_paths
from vllm.entrypoints.server.http_protocol import with_body_timeout
from vllm.entrypoints.server.startup_app import StartupApp
from vllm.entrypoints.server.tls import refresh_certificate
from vllm.entrypoints.shared.context import ServerContext
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.errors import ConfigError, EngineDeadError
from vllm.logger import init_logger
from vllm.utils.futures import end_tasks
from vllm.utils.process.process_memory import keep_for_good

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = init_logger(__name__)

_BACKLOG = 4096
_ANSWER_TIME_S = 2.0
"""Seconds to send responses after the engine has ended: running requests get their error."""
_FAST_ANSWER_TIME_S = 0.5
"""Seconds to send errors after a second signal."""
_POLL_S = 0.05
CERTIFICATE_CHECK_S = 2.0


@contextlib.contextmanager
def bind(args: ServerArgs) -> Iterator[socket.socket]:
    """Open a listening socket, so that early clients wait instead of being refused.

    Raises:
        ConfigError: the address is in use, or does not belong to this machine.
    """
    listener = _bind_unix(args.uds) if args.uds else _bind_tcp(args.host, args.port)
    try:
        listener.listen(_BACKLOG)
        yield listener
    finally:
        listener.close()
        if args.uds:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(args.uds)


def _bind_tcp(host: str | None, port: int) -> socket.socket:
    address = host or "0.0.0.0"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason += (
                ". Choose another --port (0 takes a free one), or stop the program that uses it."
            )
        raise ConfigError(f"cannot listen on {address} port {port}: {reason}") from None
    return listener


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(path) == 0:
                    raise OSError("another server uses this port")
            os.unlink(path)  # a socket that a killed server has left
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path!r}: {error.strerror or error}") from None
    return listener


Load = Callable[[], "tuple[ServerContext, FastAPI]"]
"""Makes the application, with an engine that is not started. Takes some seconds."""


def serve(
    load: Load,
    args: ServerArgs,
    listener: socket.socket,
    on_start: Callable[[], None] | None = None,
) -> int:
    """Serve until the process should exit. Returns the exit code.

    Args:
        load: called in a thread while the first requests are answered. The engine that it returns
            is started and shut down by this function.
        args: arguments of the server.
        listener: socket that `bind` returned.
        on_start: called in the event loop, before `load`.

    Raises:
        ConfigError: the engine, the application or TLS cannot start with its arguments.
        EngineDeadError: the engine has died, or could not be started.
    """
    early = StartupApp(args.root_path, page_paths(args))
    config = uvicorn.Config(
        early,
        http=with_body_timeout(args.body_timeout),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=args.keep_alive_timeout,
        timeout_graceful_shutdown=int(_ANSWER_TIME_S),
        backlog=_BACKLOG,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is a subclass
        raise ConfigError(f"TLS: {error}") from None
    return uvloop.run(_Server(config, early, load, args, on_start).run_until_end(listener))


class _Server(uvicorn.Server):
    """A uvicorn server that stops on a signal, and when the engine fails to start or dies."""

    def __init__(
        self,
        config: uvicorn.Config,
        early: StartupApp,
        load: Load,
        args: ServerArgs,
        on_start: Callable[[], None] | None,
    ) -> None:
        super().__init__(config)
        self._early = early
        self._load = load
        self._args = args
        self._on_start = on_start
        self._context: ServerContext | None = None
        self._is_draining = False
        self._exit_code = 0
        self._failure: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing, because `run_until_end` handles signals. The base class would stop without
        draining.
        """
        yield

    async def run_until_end(self, listener: socket.socket) -> int:
        """Serve with the engine, and return the exit code.

        Raises:
            The errors of `serve`.
        """
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._on_signal, signum)
        log_address(listener, self._args)
        self._spawn(self._start())
        if self.config.ssl is not None and self._args.enable_ssl_refresh:
            self._spawn(refresh_certificate(self.config, CERTIFICATE_CHECK_S))
        try:
            await self.serve(sockets=[listener])
        finally:
            self._shut_engine_down()
            await end_tasks(self._tasks)
            if self._context is not None and self._context.tracer is not None:
                await asyncio.to_thread(self._context.tracer.shutdown)
        if self._failure is not None:
            raise self._failure
        return self._exit_code

    async def _start(self) -> None:
        """Load the application, then start its engine."""
        began = time.monotonic()
        try:
            if self._on_start is not None:
                self._on_start()
            context, app = await asyncio.to_thread(self._load)
            if self._is_draining:
                return
            logger.info("start: importing the server took %.1f s", time.monotonic() - began)
            self._context = context
            context.engine.on_death(self._on_death)
            self._early.switch_to(app)
            await context.engine.start()
        except Exception as error:  # the process exits afterwards
            self._end(error)
        else:
            context.has_been_ready = True
            # No collection now, because the first requests are running.
            keep_for_good(collect=False)

    def _on_signal(self, signum: int) -> None:
        name = signal.Signals(signum).name
        if self._exit_code:
            self.should_exit = self.force_exit = True
            return
        if self._is_draining:
            logger.warning("%s received again: stopping now, without waiting for requests", name)
            self._exit_code = 128 + signum
            self._spawn(self._stop_now())
            return
        self._is_draining = True
        self._spawn(self._drain(name))

    async def _drain(self, signal_name: str) -> None:
        context, timeout_s = self._context, self._args.shutdown_timeout
        if context is not None:
            context.is_draining = True
            logger.info(
                "%s: waiting up to %g s for %d running requests",
                signal_name,
                timeout_s,
                context.num_in_progress,
            )
            if context.engine.startup.is_ready:
                await _wait_idle(context, timeout_s)
                if context.num_in_progress:
                    logger.warning(
                        "aborting %d requests that are still running", context.num_in_progress
                    )
            self._shut_engine_down()
            await _wait_idle(context, _ANSWER_TIME_S)
        self._early.close()
        self.should_exit = True

    async def _stop_now(self) -> None:
        """Fail all requests and exit. Their clients get errors, but only a short time for them."""
        self._shut_engine_down()
        if self._context is not None:
            await _wait_idle(self._context, _FAST_ANSWER_TIME_S)
        self.should_exit = self.force_exit = True

    def _on_death(self, error: BaseException) -> None:
        known = isinstance(error, Exception)
        self._end(error if known else EngineDeadError(str(error)))  # type: ignore[arg-type]

    def _end(self, error: Exception) -> None:
        """Exit with an error, after waiting requests have received their errors."""
        if not self._is_draining and self._failure is None:
            self._failure = error
            self._early.close()
            self._spawn(self._exit_when_told())

    async def _exit_when_told(self) -> None:
        await asyncio.sleep(_POLL_S)
        if self._context is not None:
            await _wait_idle(self._context, _ANSWER_TIME_S)
        self.should_exit = True

    def _shut_engine_down(self) -> None:
        if self._context is not None:
            self._context.engine.shutdown()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _wait_idle(context: ServerContext, timeout_s: float) -> None:
    """Wait until no request is in progress, at most `timeout_s` seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while context.num_in_progress and loop.time() < end:
        await asyncio.sleep(_POLL_S)


def log_address(listener: socket.socket, args: ServerArgs) -> None:
    """Log where the server listens, and where a browser on this machine finds the chat page."""
    if args.uds:
        logger.info("listening on the socket %s", args.uds)
        return
    host, port = listener.getsockname()[:2]
    scheme = "https" if args.ssl_certfile else "http"
    logger.info("listening on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)
    if not args.disable_web_ui:
        logger.info("chat page: %s://%s:%d/", scheme, _name_for_browsers(host), port)
    if host in ("0.0.0.0", "::") and not args.api_key:
        logger.warning("no --api-key is set: everyone who can reach this machine can send requests")


def _name_for_browsers(host: str) -> str:
    """Return the host name for a URL that a browser on this machine can open."""
    if host in ("0.0.0.0", "::"):
        return "localhost"
    return f"[{host}]" if ":" in host else host
