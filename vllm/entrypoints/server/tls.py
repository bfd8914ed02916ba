"""Check TLS certificates at the start, and reload them when their files change."""

import asyncio
import os
import ssl
from typing import TYPE_CHECKING

from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.errors import ConfigError
from vllm.logger import init_logger

if TYPE_CHECKING:
    import uvicorn

logger = init_logger(__name__)


def check_certificates(args: ServerArgs) -> None:
    """Check that TLS can start with the given files.

    Raises:
        ConfigError: a file cannot be read or is not PEM, or the key does not belong to the
            certificate.
    """
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(args, name)
        if path is None:
            continue
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(
                f"{name}={path!r} cannot be read: {error.strerror}. Name a PEM file"
            ) from None
    if args.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key = args.ssl_keyfile
    try:
        # An empty password, because otherwise OpenSSL asks for one on the terminal.
        context.load_cert_chain(args.ssl_certfile, key, password="")
    except OSError as error:  # ssl.SSLError is a subclass
        where = "" if key is None else f" with ssl_keyfile={key!r}"
        raise ConfigError(
            f"ssl_certfile={args.ssl_certfile!r}{where} cannot be used: {_explain(error)}. Give "
            f"the certificate in PEM format, and its own private key without a password."
        ) from None
    if args.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(args.ssl_ca_certs)
        except OSError as error:
            raise ConfigError(
                f"ssl_ca_certs={args.ssl_ca_certs!r} cannot be used: {_explain(error)}. Give "
                f"certificates in PEM format."
            ) from None


def _explain(error: OSError) -> str:
    """Return OpenSSL's reason without its codes, or a usual reason if it gives none."""
    reason = getattr(error, "reason", None) or "it is not in PEM format, or the key is missing"
    return str(reason).replace("_", " ").lower()


async def refresh_certificate(config: "uvicorn.Config", interval_s: float) -> None:
    """Reload the certificate and the key whenever their files have changed, until cancelled.

    Open connections keep the old certificate. Files that do not match, as during an update, are
    tried again.

    Args:
        config: uvicorn config with TLS.
        interval_s: seconds between two checks of the files.
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
