"""The environment variables that tell libraries which ranks and cards a process has."""

from collections.abc import Sequence

from vllm import envs
from vllm.errors import ConfigError

_VISIBLE_MODULES = "HABANA_VISIBLE_MODULES"


def rank_variables(
    rank: int, world_size: int, local_rank: int | None = None, num_local: int | None = None
) -> dict[str, str]:
    """Return the variables that tell libraries the rank of a process among the processes of an
    engine, and its Gaudi card.

    Args:
        rank, world_size: of the process, and processes in all.
        local_rank, num_local: the same on its machine; None: all are on one machine.

    Raises:
        ConfigError: HABANA_VISIBLE_MODULES is wrong, or names fewer cards than there are ranks.
    """
    local_rank = rank if local_rank is None else local_rank
    num_local = world_size if num_local is None else num_local
    cards = _visible_cards(num_local)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(num_local),
        "HLS_MODULE_ID": cards[local_rank],
    }


def _visible_cards(count: int) -> list[str]:
    cards = named_modules() or [str(n) for n in range(count)]
    if len(cards) < count:
        modules = envs.of_launcher(_VISIBLE_MODULES)
        raise ConfigError(
            f"{_VISIBLE_MODULES}={modules!r} names {len(cards)} cards, but the engine needs "
            f"{count}. Name more, or lower tensor_parallel_size or data_parallel_size"
        )
    return cards


def named_modules() -> list[str]:
    """Return the modules that HABANA_VISIBLE_MODULES names; none if it is not set.

    Raises:
        ConfigError: it is not a list of different numbers.
    """
    text = envs.of_launcher(_VISIBLE_MODULES) or ""
    names = [name.strip() for name in text.split(",") if name.strip()]
    is_number = all(name.isascii() and name.isdecimal() for name in names)
    if not is_number or len({int(name) for name in names}) < len(names):
        raise ConfigError(
            f"{_VISIBLE_MODULES}={text!r}: expected different numbers of modules, separated by "
            f"commas, such as 0,1,2,3. `hl-smi -Q index,module_id -f csv` lists them. Unset it to "
            f"use all cards"
        )
    return [str(int(name)) for name in names]


def respell_modules() -> None:
    """Write HABANA_VISIBLE_MODULES as libraries expect it, without spaces and empty parts, if it is
    set.

    Raises:
        ConfigError: it is not a list of different numbers.
    """
    if names := named_modules():
        envs.export(_VISIBLE_MODULES, ",".join(names))


def export_modules(modules: Sequence[int]) -> None:
    """Name the modules of the cards of this machine or container, unless the user has named
    some, or they are the first ones, which libraries take by default.
    """
    if not envs.is_set(_VISIBLE_MODULES) and list(modules) != list(range(len(modules))):
        envs.export(_VISIBLE_MODULES, ",".join(map(str, modules)))


def modules_of(num_ranks: int) -> frozenset[int] | None:
    """Return the modules of the cards that the processes of an engine on this machine use; None:
    any. A single process uses a free card, of the cards that it sees.

    Args:
        num_ranks: processes on this machine, of all replicas.
    """
    visible = (envs.of_launcher(_VISIBLE_MODULES) or "").split(",")
    modules = [int(name) for name in visible if name.strip().isdecimal()]
    if num_ranks > 1:
        return frozenset((modules or range(num_ranks))[:num_ranks])
    return frozenset(modules) or None


def export_replica(index: int, count: int, world_size: int) -> None:
    """Hide the Gaudi cards of other replicas from this process, before a library looks."""
    cards = _visible_cards(count * world_size)
    own = cards[index * world_size : (index + 1) * world_size]
    envs.export(_VISIBLE_MODULES, ",".join(own))


def export_rank(
    rank: int, world_size: int, local_rank: int | None = None, num_local: int | None = None
) -> None:
    """Set the variables of a rank in this process, before a library reads them."""
    for name, value in rank_variables(rank, world_size, local_rank, num_local).items():
        envs.export(name, value)
    envs.get.cache_clear()
