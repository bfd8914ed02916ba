"""Hosts of URLs: a normal form, and whether an address belongs to the public internet.

A server that fetches URLs of its clients must not let them reach its own network: other services of
the machine, the cloud's metadata service, or machines of the intranet.
"""

import re
from ipaddress import (
    AddressValueError,
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
)

Address = IPv4Address | IPv6Address

_NAME = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
_NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
"""Addresses by which a network without IPv4 reaches the IPv4 address in their last 32 bits."""
_RESERVED = (
    IPv4Network("192.0.0.0/24"),  # protocols of the IETF
    IPv4Network("192.88.99.0/24"),  # relays of 6to4
    IPv6Network("3fff::/20"),  # documentation
)
"""Reserved networks, some or all of which `ipaddress` regards as global, depending on the release
of Python."""
_MAX_NAME_CHARS = 253


def normalize_host(host: str) -> str:
    """Return the host of a URL in normal form: lower-case ASCII without a trailing dot or brackets.

    >>> normalize_host("BÜCHER.example."), normalize_host("[0::1]"), normalize_host("1.1.1.1.")
    ('xn--bcher-kva.example', '::1', '1.1.1.1')

    Raises:
        ValueError: it is neither a name nor an address in the usual spelling; str() says why.
    """
    text = host.removeprefix("[").removesuffix("]")
    if "%" in text:
        raise ValueError("an address with a zone is not accepted")
    if ":" in text:
        return str(_parse(IPv6Address, text))
    # With a trailing dot; longer names are refused first because encoding them is slow.
    if len(text) > _MAX_NAME_CHARS + 1:
        raise ValueError("the name of a host has at most 253 characters")
    try:
        name = text.encode("idna").decode().lower().removesuffix(".")
    except UnicodeError:
        raise ValueError("it is not a valid host name") from None
    if not _NAME.fullmatch(name):
        raise ValueError("it is not a valid host name")
    if _NUMERIC_LABEL.fullmatch(name.rpartition(".")[2]):
        # The system's resolver also accepts 127.1, 0x7f000001 and 2130706433, so parse numbers
        # strictly.
        return str(_parse(IPv4Address, name))
    return name


def _parse(kind: type[IPv4Address] | type[IPv6Address], text: str) -> Address:
    try:
        return kind(text)
    except AddressValueError:
        raise ValueError(
            "an IP address must be four decimal numbers with dots, or IPv6 in brackets"
        ) from None


def is_public(address: str) -> bool:
    """Return whether a numeric address belongs to one machine of the public internet.

    >>> is_public("1.1.1.1"), is_public("::ffff:10.0.0.1")
    (True, False)
    """
    found = ip_address(address)
    if isinstance(found, IPv6Address):
        if found.scope_id is not None:
            return False
        inner = found.ipv4_mapped or found.sixtofour
        if found in _NAT64:
            inner = IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            found = inner
        elif found not in _GLOBAL_UNICAST:
            return False
    is_reserved = found.is_reserved or any(found in network for network in _RESERVED)
    return found.is_global and not found.is_multicast and not is_reserved
