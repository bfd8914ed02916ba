"""The environment variables that tell libraries which ranks and cards a process has."""

from vllm import envs
from vllm.errors import ConfigError


def rank_variables(
    rank: int, world_size: int, local_rank: int | None = None, num_local: int | None = None
) -> dict[str, str]:
    """Return the variables that tell libraries the rank of a process among the processes of an
    engine, and its Gaudi card.

    Args:
        rank, world_size: of the process, and processes in all.
        local_rank, num_local: the same on its machine; None: all are on one machine.

    Raises:
        ConfigError: HABANA_VISIBLE_MODULES names fewer cards than there are ranks.
    """
    local_rank = rank if local_rank is None else local_rank
    num_local = world_size if num_local is None else num_local
    cards = _visible_cards(num_local)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(num_local),
        "HLS_MODULE_ID": cards[local_rank].strip(),
    }


def _visible_cards(count: int) -> list[str]:
    modules = envs.of_launcher("HABANA_VISIBLE_MODULES") or ""
    cards = modules.split(",") if modules.strip() else [str(n) for n in range(count)]
    if len(cards) < count:
        raise ConfigError(
            f"HABANA_VISIBLE_MODULES={modules!r} names {len(cards)} cards, but the engine needs "
            f"{count}. Name more, or lower tensor_parallel_size or data_parallel_size"
        )
    return cards


def modules_of(num_ranks: int) -> frozenset[int] | None:
    """Return the modules of the cards that the processes of an engine on this machine use; None:
    any. A single process uses a free card, of the cards that it sees.

    Args:
        num_ranks: processes on this machine, of all replicas.
    """
    visible = (envs.of_launcher("HABANA_VISIBLE_MODULES") or "").split(",")
    modules = [int(name) for name in visible if name.strip().isdecimal()]
    if num_ranks > 1:
        return frozenset((modules or range(num_ranks))[:num_ranks])
    return frozenset(modules) or None


def export_replica(index: int, count: int, world_size: int) -> None:
    """Hide the Gaudi cards of other replicas from this process, before a library looks."""
    cards = _visible_cards(count * world_size)
    own = cards[index * world_size : (index + 1) * world_size]
    envs.export("HABANA_VISIBLE_MODULES", ",".join(card.strip() for card in own))


def export_rank(
    rank: int, world_size: int, local_rank: int | None = None, num_local: int | None = None
) -> None:
    """Set the variables of a rank in this process, before a library reads them."""
    for name, value in rank_variables(rank, world_size, local_rank, num_local).items():
        envs.export(name, value)
    envs.get.cache_clear()
