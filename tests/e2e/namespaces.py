"""Network namespaces that behave like machines with their own addresses and links."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_SUBNET = f"10.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}"


class Machine:
    """A namespace with one address and one link.

    Attributes:
        address: its address, which the other machine uses.
        interface: name of its link.
    """

    def __init__(self, number: int) -> None:
        self.address = f"{_SUBNET}.{1 + number}"
        self.interface = f"vt{os.getpid()}n{number}"
        self._name = f"vllm-{os.getpid()}-{number}"

    def create(self) -> None:
        """Create the namespace, without a link yet."""
        ip("netns", "add", self._name)

    def connect(self) -> None:
        """Move the interface into the namespace, and give it the address."""
        ip("link", "set", self.interface, "netns", self._name)
        self.ip("address", "add", f"{self.address}/24", "dev", self.interface)
        for interface in ("lo", self.interface):
            self.ip("link", "set", interface, "up")

    def set_link(self, state: str) -> None:
        """Switch the link on or off. While it is off, all sent data is lost, without an error for
        the sender.
        """
        self.ip("link", "set", self.interface, state)

    def ip(self, *arguments: str) -> None:
        """Run `ip` in the namespace."""
        ip("-n", self._name, *arguments)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Let the sockets and processes that this thread makes in this context belong to the
        namespace.
        """
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/run/netns/{self._name}", os.O_RDONLY)
        try:
            _enter(there)
            yield
        finally:
            _enter(before)
            os.close(before)
            os.close(there)

    def remove(self) -> None:
        """Remove the namespace with its link."""
        subprocess.run(["ip", "netns", "delete", self._name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _enter(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Make two namespaces with a link between them; skip the test if the system does not allow
    it.
    """
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2)")
    first, second = machines = Machine(0), Machine(1)
    try:
        try:
            first.create()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed: {error.stderr.decode().strip()}")
        second.create()
        ip("link", "add", first.interface, "type", "veth", "peer", "name", second.interface)
        for machine in machines:
            machine.connect()
        yield first, second
    finally:
        for machine in machines:
            machine.remove()
