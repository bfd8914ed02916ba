"""Certificates that change while the server runs."""

import asyncio
import os
import ssl

import uvicorn

from vllm.logger import init_logger

logger = init_logger(__name__)


async def refresh_certificate(config: uvicorn.Config, interval_s: float) -> None:
    """Load certificate and key again whenever their files have changed; runs until cancelled.

    Connections that are open keep theirs. Files that do not fit together, as in the middle of a
    change, are tried again.

    Args:
        config: with TLS.
        interval_s: between two looks at the files.
    """
    assert config.ssl is not None and config.ssl_certfile is not None
    paths = [str(path) for path in (config.ssl_certfile, config.ssl_keyfile) if path]
    loaded = _stamp(paths)
    while True:
        await asyncio.sleep(interval_s)
        stamp = _stamp(paths)
        if stamp == loaded:
            continue
        try:
            config.ssl.load_cert_chain(*paths)
        except (OSError, ssl.SSLError) as error:
            logger.warning("the changed certificate cannot be loaded: %s", error)
            continue
        loaded = stamp
        logger.info("the certificate was loaded again")


def _stamp(paths: list[str]) -> list[tuple[int, int]]:
    stamps = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            stamps.append((0, 0))
        else:
            stamps.append((status.st_mtime_ns, status.st_size))
    return stamps
