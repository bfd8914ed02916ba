"""Fetches URLs for clients, which must not reach the internal network or the files of the server.

http, https   only hosts of the public internet, or the hosts that the operator names
file          only below the folder that the operator names
data          its content
"""

import asyncio
import contextvars
import os
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import SplitResult, urljoin, urlsplit

from vllm.errors import ConfigError
from vllm.multimodal.fetching.addresses import is_public, normalize_host
from vllm.multimodal.fetching.data_url import read_data_url
from vllm.multimodal.fetching.http_get import Budget, HTTPError, Target, get
from vllm.multimodal.fetching.local_file import local_path, read_below
from vllm.multimodal.interface.media_times import MediaTimes
from vllm.multimodal.interface.source import refuse
from vllm.utils.background_work import run_in_time_slices

MAX_BYTES = 256 * 2**20
MAX_REQUEST_BYTES = 2 * MAX_BYTES
"""Limit of all files of one request together."""
MAX_REDIRECTS = 5

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""A function from the name of a host and a port to numeric addresses; raises OSError."""

_NUM_LOOKUPS = 16
_REDIRECTS = (301, 302, 303, 307, 308)
_SMALL_CHARS = 2**20
"""A data: URL up to this length is decoded in the event loop, a longer one in a thread."""
_SHOWN_CHARS = 200
_LOGIN = re.compile(r"//[^/?#]*@")
_MAX_LOGIN_CHARS = 8192


class MediaFetcher:
    """Fetches URLs that clients send.

    Each name is resolved once, and every address must be public. The fetcher connects to one of
    these addresses, and keeps the name for the `Host` header and the certificate. Each redirect is
    checked in the same way. Proxies of the environment are not used.

    Args:
        allowed_local_media_path: folder whose files file: URLs may name. None or empty: none.
        allowed_media_domains: the only hosts that are allowed; their addresses may be private.
            Empty: every public host.
        timeout_s: seconds for a whole fetch, by modality.
        max_bytes: limit of the content.
        max_redirects: limit of redirects; 0: redirects are errors.
        resolve: function that resolves names of hosts, for tests; None: the resolver of the system.

    Attributes:
        times: counts all fetches, including failed ones.

    Raises:
        ConfigError: the folder does not exist, or a domain is malformed.
    """

    def __init__(
        self,
        allowed_local_media_path: str | None,
        allowed_media_domains: Sequence[str],
        *,
        timeout_s: Mapping[str, float],
        max_bytes: int = MAX_BYTES,
        max_redirects: int = MAX_REDIRECTS,
        resolve: Resolve | None = None,
    ) -> None:
        self._folder = _checked_folder(allowed_local_media_path)
        self._domains = frozenset(map(_checked_domain, allowed_media_domains))
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._max_redirects = max_redirects
        self._lookups = ThreadPoolExecutor(_NUM_LOOKUPS, thread_name_prefix="media-dns")
        # One thread: the event loop waits for a turn of each that wants the interpreter.
        self._decoding = ThreadPoolExecutor(1, thread_name_prefix="media-base64")
        self._resolve = resolve or self._look_up
        self.times = MediaTimes()

    def make_budget(self) -> Budget:
        """Return the size limit for all fetches of one request."""
        return Budget(MAX_REQUEST_BYTES)

    async def fetch(
        self, url: str, modality: str, where: str, budget: Budget | None = None
    ) -> bytes:
        """Fetch the content of a URL.

        Args:
            url: http:, https:, data: or file:.
            modality: "image", "audio" or "video", for the time limit.
            where: name of the item in error messages.
            budget: budget of the request; None: a new one. The content of data: URLs does not
                count.

        Raises:
            RequestError: it is not allowed, cannot be fetched in time, or is too large.
        """
        began = time.monotonic()
        try:
            return await self._fetch(url.strip(), modality, where, budget or self.make_budget())
        finally:
            self.times.add(modality, time.monotonic() - began)

    def fetch_sync(self, url: str, modality: str, where: str) -> bytes:
        """Fetch the content of a URL, blocking. May be called while an event loop runs."""
        context = contextvars.copy_context()
        with ThreadPoolExecutor(1, thread_name_prefix="media-fetch") as thread:
            run = thread.submit(context.run, asyncio.run, self.fetch(url, modality, where))
            return run.result()

    def close(self) -> None:
        """Stop resolving names and decoding."""
        self._decoding.shutdown(wait=False, cancel_futures=True)
        self._lookups.shutdown(wait=False, cancel_futures=True)

    async def _fetch(self, url: str, modality: str, where: str, budget: Budget) -> bytes:
        shown = show_url(url)
        # Sliced first, to avoid a copy of a long data: URL.
        scheme = url[: max(0, url.find(":"))].lower()
        if scheme == "data":
            return await self._read_data_url(url, where)
        timeout_s = self._timeout_s[modality]
        try:
            if scheme == "file":
                reading = asyncio.to_thread(self._read_file, url)
                data = await asyncio.wait_for(reading, timeout_s)
                budget.count(len(data))
                return data
            if scheme in ("http", "https"):
                return await asyncio.wait_for(self._follow(url, budget), timeout_s)
        except asyncio.TimeoutError:
            reason = f"it took longer than the limit of {timeout_s:g} s"
        except (HTTPError, OSError, ValueError) as error:
            reason = _describe(error)
        else:
            raise refuse(where, f"{shown!r} must begin with http:, https:, data: or file:")
        raise refuse(where, f"cannot fetch {shown!r}: {reason}")

    async def _read_data_url(self, url: str, where: str) -> bytes:
        if len(url) <= _SMALL_CHARS:
            return read_data_url(url, where=where, max_bytes=self._max_bytes)
        read = partial(read_data_url, url, where=where, max_bytes=self._max_bytes)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._decoding, run_in_time_slices, read)

    def _read_file(self, url: str) -> bytes:
        if self._folder is None:
            raise PermissionError(
                "this server does not read files. --allowed-local-media-path names a folder whose "
                "files may be read"
            )
        return read_below(self._folder, local_path(urlsplit(url)), self._max_bytes)

    async def _follow(self, url: str, budget: Budget) -> bytes:
        """Fetch a URL, following redirects."""
        for _ in range(self._max_redirects + 1):
            target = _parse(url)
            addresses = await self._checked_addresses(target)
            answer = await get(target, addresses, self._max_bytes, budget)
            if answer.status == 200:
                return bytes(answer.body)
            location = answer.headers.get("location")
            if answer.status not in _REDIRECTS or location is None:
                raise HTTPError(f"the status of the answer must be 200, got {answer.status}")
            url = urljoin(url, location)
        if not self._max_redirects:
            raise HTTPError("it redirects to another URL, and redirects are not followed")
        raise HTTPError(f"it redirects more than {self._max_redirects} times")

    async def _checked_addresses(self, target: Target) -> Sequence[str]:
        """Return the addresses of a host, after checking that it is allowed."""
        if self._domains and target.host not in self._domains:
            raise PermissionError(
                f"the host {target.host!r} is not allowed: --allowed-media-domains does not name it"
            )
        addresses = await self._resolve(target.host, target.connect_port())
        # The error does not contain the address, which would reveal the network of the server.
        if not self._domains and not all(map(is_public, addresses)):
            raise PermissionError(
                f"the host {target.host!r} is not on the public internet. "
                f"--allowed-media-domains may name it"
            )
        return addresses

    async def _look_up(self, host: str, port: int) -> Sequence[str]:
        # In threads of its own, so that a look-up that hangs does not block other work.
        found = await asyncio.get_running_loop().run_in_executor(
            self._lookups, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return list(dict.fromkeys(str(address[0]) for *_, address in found))


def show_url(url: str) -> str:
    """Shorten a URL for messages, without a password and the content of a data: URL."""
    if url[:5].lower() == "data:":
        return "data:..."
    shown = _LOGIN.sub("//...@", url[:_MAX_LOGIN_CHARS], count=1)
    return shown if len(url) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."


def _parse(url: str) -> Target:
    """Parse a URL of a client or of a redirect.

    Raises:
        ValueError: it is malformed, or contains a user name.
    """
    parts: SplitResult = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError("it redirects to a URL that does not begin with http: or https:")
    if "@" in parts.netloc or "\\" in parts.netloc:
        raise ValueError("a user name, a password or a backslash in a URL is not accepted")
    try:
        port = parts.port
        host = normalize_host(parts.hostname or "")
    except ValueError as error:
        raise ValueError(f"its host or its port is not accepted: {error}") from None
    path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path
    return Target(scheme=parts.scheme, host=host, port=port, path=path)


def _describe(error: Exception) -> str:
    """Return the reason of an error, without the address or the path in the system's message."""
    if isinstance(error, socket.gaierror):
        return "the name of its host cannot be resolved"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection can be made: {error.reason}"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def _checked_folder(path: str | None) -> Path | None:
    if not path:
        return None
    folder = Path(os.path.realpath(os.path.expanduser(path)))
    if not folder.is_dir():
        raise ConfigError(
            f"--allowed-local-media-path {path!r} is not a folder. Name a folder that exists"
        )
    return folder


def _checked_domain(domain: str) -> str:
    try:
        return normalize_host(domain)
    except ValueError as error:
        raise ConfigError(
            f"--allowed-media-domains {domain!r}: {error}. Name hosts only, such as example.com, "
            f"without scheme and port"
        ) from None
