"""How long something takes on a card: by the clock of a simulated one, else by that of the host."""

from collections.abc import Callable

from vllm.platforms.habana.bridge import HabanaBridge

_NUM_RUNS = 5


def shortest_s(bridge: HabanaBridge, run: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs, the wait for the card included."""
    return min(elapsed_s(bridge, run) for _ in range(_NUM_RUNS))


def elapsed_s(bridge: HabanaBridge, run: Callable[[], object]) -> float:
    """Seconds of one run, the wait for the card included."""
    start = _now_s(bridge)
    run()
    return _now_s(bridge) - start


def _now_s(bridge: HabanaBridge) -> float:
    bridge.synchronize()
    return bridge.now_s()
