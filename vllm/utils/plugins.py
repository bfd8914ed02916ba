"""Load plug-ins of other packages: functions that run once at the start of each engine process.

A package declares them as entry points of the group `vllm.general_plugins`. They call, for example,
`ModelRegistry.register_model`.
"""

from functools import cache
from importlib.metadata import entry_points

from vllm import envs
from vllm.logger import init_logger

logger = init_logger(__name__)

_GROUP = "vllm.general_plugins"


@cache
def load_general_plugins() -> tuple[str, ...]:
    """Call every plug-in, or only the ones in VLLM_PLUGINS. Later calls in this process do nothing.

    If a plug-in raises, a warning is logged and the others run.

    Returns:
        Names of the plug-ins that ran.
    """
    found = {entry.name: entry for entry in entry_points(group=_GROUP)}
    asked = envs.get().VLLM_PLUGINS
    names = list(found) if asked is None else [name.strip() for name in asked.split(",")]
    loaded = []
    for name in filter(None, dict.fromkeys(names)):
        if name not in found:
            logger.warning(
                "VLLM_PLUGINS names the plug-in '%s', but no installed package has it; installed "
                "plug-ins: %s",
                *(name, ", ".join(found) or "none"),
            )
            continue
        try:
            found[name].load()()
        except Exception as error:  # code of another package may raise anything
            logger.warning(
                "the plug-in '%s' (%s) has failed, so its models cannot be used: %s: %s",
                *(name, found[name].value, type(error).__name__, " ".join(str(error).split())),
            )
        else:
            loaded.append(name)
    if loaded:
        logger.info("loaded plug-ins: %s", ", ".join(loaded))
    return tuple(loaded)
