"""Test which hosts are public, in every spelling."""

import pytest

from tests.loops import loop_over
from vllm.multimodal.fetching.addresses import is_public, normalize_host


@loop_over(
    "address, expected",
    [
        ("1.1.1.1", True),
        ("93.184.215.14", True),
        ("2606:4700::1111", True),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("100.64.0.1", False),  # shared address space of carriers
        ("127.0.0.1", False),
        ("127.255.255.254", False),
        ("169.254.169.254", False),  # metadata service of a cloud
        ("172.16.0.1", False),
        ("172.31.255.255", False),
        ("192.0.0.1", False),  # protocols of the IETF
        ("192.0.0.9", False),
        ("192.0.0.170", False),
        ("192.0.2.1", False),  # addresses for documentation
        ("192.88.99.1", False),  # relays of 6to4
        ("192.168.1.1", False),
        ("198.18.0.1", False),  # addresses for benchmarks
        ("198.51.100.1", False),  # addresses for documentation
        ("203.0.113.1", False),
        ("224.0.0.1", False),  # multicast
        ("239.255.255.255", False),
        ("240.0.0.1", False),  # reserved
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("::127.0.0.1", False),  # IPv4-compatible address
        ("::1.1.1.1", False),
        ("::ffff:127.0.0.1", False),  # IPv4-mapped address
        ("::ffff:1.1.1.1", True),
        ("::ffff:0:127.0.0.1", False),  # IPv4-translated address
        ("::ffff:7f00:1", False),
        ("::ffff:169.254.169.254", False),
        ("::ffff:192.88.99.1", False),
        ("64:ff9b::7f00:1", False),  # NAT64: the IPv4 address is in the last 32 bits
        ("64:ff9b::101:101", True),
        ("64:ff9b:1::101:101", False),  # NAT64 prefix of a local network
        ("2002:7f00:1::", False),  # 6to4: the IPv4 address comes after 2002:
        ("2002:c0a8:101::1", False),
        ("2002:101:101::", True),
        ("2002:e000:1::", False),  # multicast
        ("2002:c058:6301::1", False),
        ("64:ff9b::192.168.1.1", False),
        ("2001:0:101:101::", False),  # Teredo tunnel
        ("2001:20::1", False),  # identifiers of machines, which have no route
        ("2001:db8::1", False),  # addresses for documentation
        ("3fff::1", False),
        ("5f00::1", False),  # segment routing
        ("100::1", False),  # packets to this address are discarded
        ("fc00::1", False),
        ("fd12:3456::1", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fe80::5efe:127.0.0.1", False),
        ("2606:4700::1111%eth0", False),
        ("fec0::1", False),
        ("ff02::1", False),
    ],
)
def test_only_addresses_of_the_internet_are_public(address, expected):
    assert is_public(address) is expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("Example.COM", "example.com"),
        ("example.com.", "example.com"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
        ("my_host", "my_host"),
        ("１２７.0.0.1", "127.0.0.1"),  # full-width digits
        ("127。0。0。1", "127.0.0.1"),  # ideographic full stops
        ("ⓛocalhost", "localhost"),
        ("127.0.0.1.", "127.0.0.1"),
        ("[::1]", "::1"),
        ("2606:4700:0:0:0:0:0:ABCD", "2606:4700::abcd"),
    ],
)
def test_a_host_has_one_spelling(host, expected):
    assert normalize_host(host) == expected
    assert normalize_host(expected) == expected


@loop_over(
    "host",
    [
        *("127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "0177.0.0.1", "0x"),
        *("127.0.0.01", "127.0.0.256", "1.2.3.4.5", "example.1", "127.0.0.1.1."),
        *(
            "",
            ".",
            "..",
            "a..b",
            "a b",
            "a/b",
            "a@b",
            "a\\b",
            "a\nb",
            "a" * 64,
            "a." * 127 + "b",
            "é" * 10**6,
        ),
        *("fe80::1%eth0", "fe80::1%25eth0", "a%00b", "::1::", "::g"),
    ],
)
def test_other_spellings_are_refused(host):
    with pytest.raises(
        ValueError, match=r"IP address must be|not a valid host name|at most 253|with a zone"
    ):
        normalize_host(host)
