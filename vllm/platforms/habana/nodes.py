"""Find the Gaudi cards of this machine or container by their device nodes, and say why there are
none.

Opens no card, runs no program such as hl-smi, and imports no library of the vendor.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_DEV = Path("/dev")
_ACCEL_CLASS = Path("/sys/class/accel")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_PROCESSES = Path("/proc")
_HABANA_LABS = 0x1DA3
"""Vendor number of the cards on the PCI bus."""
_DRIVER = "habanalabs"
_MAX_HOLDERS = 3
_MAX_COMMAND = 60
"""Characters of the command line of another process in a message."""


def num_cards() -> int:
    """Count the Gaudi cards that this machine, or container, shows.

    Accelerators of other vendors, such as the NPU of a processor, have nodes with the same names;
    they are not counted.
    """
    return len(_nodes())


def card_modules() -> list[int]:
    """Return the module of each card that this machine, or container, shows, in ascending order;
    empty if the system does not report the module of each card.
    """
    try:
        return sorted(int((device / "module_id").read_text()) for device in card_devices())
    except (OSError, ValueError):
        return []


def card_devices() -> list[Path]:
    """Return the folder of the system with the attributes of each card."""
    return [_ACCEL_CLASS / node.name / "device" for node in _accel_nodes()]


def why_no_card(visible_devices: str | None) -> str:
    """Say what is known about the reason that there is no node of a card.

    Args:
        visible_devices: value of HABANA_VISIBLE_DEVICES, or None.
    """
    text = "there is no Gaudi among /dev/accel/accel* and /dev/hl*"
    start = "`docker run --runtime=habana -e HABANA_VISIBLE_DEVICES=all`"
    if hides_cards(visible_devices):
        return (
            f"{text}: HABANA_VISIBLE_DEVICES={visible_devices} hides the cards from this "
            f"container. Create it with {start}"
        )
    names = chosen_cards(visible_devices)
    if not all(name.isdecimal() for name in names or ()):
        return (
            f"{text}: HABANA_VISIBLE_DEVICES={visible_devices} is neither `all` nor a list of "
            f"indices of cards, such as 0,1. Create the container with {start}"
        )
    if count := sum(_is_gaudi(path.name) for path in _ACCEL_CLASS.glob("accel[0-9]*")):
        if names and all(int(name) >= count for name in names):
            return (
                f"{text}: HABANA_VISIBLE_DEVICES={visible_devices} names none of the "
                f"{_cards(count)} of the host, whose indices begin with 0. Create the container "
                f"with {start}"
            )
        return (
            f"{text}: the driver has {_cards(count)}, but this container has no node of a card. "
            f"Create it with {start}"
        )
    if count := sum(_vendor(path) == _HABANA_LABS for path in _PCI_DEVICES.glob("*")):
        return (
            f"{text}: the PCI bus has {_cards(count)}, but no driver uses them. Install the "
            f"vendor's driver on the host, and load it with `modprobe {_DRIVER}`"
        )
    return f"{text}: no card, no driver, or a container without --runtime=habana"


def chosen_cards(visible_devices: str | None) -> list[str] | None:
    """Return the parts of a value of HABANA_VISIBLE_DEVICES, as indices of cards if it is correct;
    None if it is not set or chooses all cards.
    """
    names = [name.strip() for name in (visible_devices or "").split(",") if name.strip()]
    return None if not names or [name.lower() for name in names] == ["all"] else names


def hides_cards(visible_devices: str | None) -> bool:
    """Return whether a value of HABANA_VISIBLE_DEVICES asks for no card at all."""
    return (visible_devices or "").strip().lower() in ("none", "void")


def why_not_permitted() -> str | None:
    """Say why this process may open none of the cards; None if it may open one, or there is
    none.
    """
    nodes = _nodes()
    if not nodes or any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
        return None
    status = nodes[0].stat()
    groups = _listed(sorted({os.getegid(), *os.getgroups()}))
    return (
        f"this process has user {os.geteuid()} and groups {groups}, and "
        f"may not read and write {nodes[0]}, which has user {status.st_uid}, group "
        f"{status.st_gid} and mode {status.st_mode & 0o777:o}. Add the user to that group (`docker "
        f"run --group-add {status.st_gid}`), or change the mode of the nodes on the host"
    )


def holders() -> list[str]:
    """Describe the other processes that have a card open. Processes of other users and containers
    are not visible.
    """
    nodes = {str(node) for node in _nodes()}
    found = []
    for folder in sorted(_PROCESSES.glob("[0-9]*"), key=lambda path: int(path.name)):
        if int(folder.name) != os.getpid() and (held := nodes & set(_open_files(folder))):
            found.append(f"process {folder.name} ({_command(folder)}) has {_listed(sorted(held))}")
    rest = len(found) - _MAX_HOLDERS
    return found[:_MAX_HOLDERS] + [f"{rest} more processes have cards"] * (rest > 0)


def _nodes() -> list[Path]:
    """Return the nodes of the cards; older drivers have others than newer ones."""
    return sorted(_accel_nodes() or _DEV.glob("hl[0-9]*"))


def _accel_nodes() -> list[Path]:
    return [node for node in _DEV.glob("accel/accel[0-9]*") if _is_gaudi(node.name)]


def _is_gaudi(name: str) -> bool:
    """Return whether an accelerator is a Gaudi, by its PCI vendor or else its driver; True if the
    system reports neither.
    """
    device = _ACCEL_CLASS / name / "device"
    if (vendor := _vendor(device)) is not None:
        return vendor == _HABANA_LABS
    driver = device / "driver"
    return not driver.exists() or driver.resolve().name == _DRIVER


def _vendor(device: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int((device / "vendor").read_text(), 16)
    return None


def _open_files(process: Path) -> Iterator[str]:
    """Yield the open files of a process; none if it belongs to another user or has ended."""
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                yield os.readlink(link)


def _command(process: Path) -> str:
    words = b""
    with suppress(OSError):
        words = (process / "cmdline").read_bytes()
    text = " ".join(words.decode(errors="replace").split("\0")).strip() or "of unknown name"
    return text if len(text) <= _MAX_COMMAND else f"{text[:_MAX_COMMAND]}..."


def _cards(count: int) -> str:
    return f"{count} Gaudi card{'s' if count > 1 else ''}"


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
