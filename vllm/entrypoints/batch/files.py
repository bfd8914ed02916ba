"""Open the input and output of a batch: files, streams and URLs."""

import contextlib
import os
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast
from urllib.parse import urlsplit

from vllm.errors import ConfigError
from vllm.logger import init_logger

logger = init_logger(__name__)

_TIMEOUT_S = 60.0
"""Seconds for a server to send or to accept more data."""

_STDOUT = ("-", "/dev/stdout")


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


@contextlib.contextmanager
def open_input(source: str) -> Iterator[IO[bytes]]:
    """Open the input of a batch, so that it can be read twice.

    Args:
        source: a file, a pipe, or an http(s) URL.

    Raises:
        ConfigError: it does not exist, or cannot be downloaded.
    """
    with contextlib.ExitStack() as stack:
        try:
            lines = _open_source(source)
            stack.callback(lines.close)
            if not lines.seekable():
                copy = stack.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(lines, copy)
                copy.seek(0)
                lines = cast(IO[bytes], copy)
        except OSError as error:  # URLError and HTTPError are subclasses
            verb = "download" if _is_url(source) else "read"
            raise ConfigError(f"cannot {verb} {source!r}: {_explain(error)}") from None
        yield lines


def _open_source(source: str) -> IO[bytes]:
    if _is_url(source):
        return cast(IO[bytes], urllib.request.urlopen(source, timeout=_TIMEOUT_S))
    return open(source, "rb")


@contextlib.contextmanager
def open_output(target: str, folder: str | None = None) -> Iterator[IO[bytes]]:
    """Open the output of a batch.

    A file gets its final name after everything is written, and a URL receives everything with one
    PUT. If the batch fails earlier, the records remain in a temporary file, which the log names.
    Every write is flushed, so a killed process loses no record. Standard output, pipes and devices
    are written to directly.

    Args:
        target: a file, `-`, or an http(s) URL.
        folder: folder of the records until they are sent to a URL; None: the system's folder for
            temporary files.

    Raises:
        ConfigError: the file cannot be written, or the server refuses the records.
    """
    if _is_url(target):
        opened = _open_upload(target, folder)
    elif target in _STDOUT:
        opened = _open_stdout()
    elif Path(target).exists() and not Path(target).is_file():
        opened = _open_stream(target)
    else:
        opened = _open_file(Path(target))
    with opened as output:
        yield output


@contextlib.contextmanager
def _open_file(path: Path) -> Iterator[IO[bytes]]:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        file = partial.open("xb", buffering=0)
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}") from None
    with _kept_when_broken_off(partial), file:
        yield file
    partial.replace(path)


@contextlib.contextmanager
def _open_upload(url: str, folder: str | None) -> Iterator[IO[bytes]]:
    if not urlsplit(url).hostname:
        raise ConfigError(f"cannot write {url!r}: the URL has no host")
    try:
        fd, name = tempfile.mkstemp(prefix="vllm-batch-", suffix=".jsonl", dir=folder)
    except OSError as error:
        raise ConfigError(f"cannot write into {folder!r}: {error.strerror}") from None
    path = Path(name)
    with _kept_when_broken_off(path):
        with open(fd, "wb", buffering=0) as file:
            yield file
        _upload(path, url)
    path.unlink()


def _upload(path: Path, url: str) -> None:
    headers = {"Content-Type": "application/jsonl", "Content-Length": str(path.stat().st_size)}
    with path.open("rb") as file:
        request = urllib.request.Request(url, data=file, headers=headers, method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
                pass
        except OSError as error:
            raise ConfigError(f"cannot upload to {url!r}: {_explain(error)}") from None


@contextlib.contextmanager
def _open_stdout() -> Iterator[IO[bytes]]:
    sys.stdout.flush()
    with open(os.dup(sys.stdout.fileno()), "wb", buffering=0) as file:
        yield file


@contextlib.contextmanager
def _open_stream(path: str) -> Iterator[IO[bytes]]:
    try:
        file = open(path, "wb", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"cannot write {path!r}: {error.strerror}") from None
    with file:
        yield file


@contextlib.contextmanager
def _kept_when_broken_off(path: Path) -> Iterator[None]:
    """Keep the file if writing fails, unless it is empty."""
    try:
        yield
    except BaseException:
        if path.stat().st_size:
            logger.warning("the answers so far are in %s", path)
        else:
            path.unlink()
        raise


def _explain(error: OSError) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code} {error.reason}"
    return error.strerror or str(error)
