"""Check the network interfaces that the variables of collective libraries name.

The libraries report an unknown interface late, in their own words, or wait for the other ranks.
"""

import socket

from vllm import envs
from vllm.errors import ConfigError

_GLOO, _HCCL = "GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"


def check_interfaces(backend: str) -> None:
    """Check that this machine has an interface of each variable that is set.

    Gloo, which every engine of several ranks uses, wants whole names. HCCL takes the beginnings of
    names, and a name after ^ is one that it must not use.

    Args:
        backend: backend of torch.distributed for tensors, such as hccl.

    Raises:
        ConfigError: there is no such interface.
    """
    present = [name for _, name in socket.if_nameindex()]
    for variable in (_GLOO, _HCCL) if backend == "hccl" else (_GLOO,):
        text = envs.of_launcher(variable) or ""
        names = [name.strip() for name in text.split(",") if name.strip()]
        if variable == _GLOO:
            is_there = set(names) <= set(present)
        else:
            is_there = text.lstrip().startswith("^") or any(
                each.startswith(name.removeprefix("=")) for name in names for each in present
            )
        if names and not is_there:
            raise ConfigError(
                f"{variable}={text}: this machine has no such network interface; it has "
                f"{', '.join(present)}. Name the one that reaches the other machines (`ip addr` "
                f"lists them), or unset the variable"
            )
