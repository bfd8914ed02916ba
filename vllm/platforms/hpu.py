"""Implement the Intel Gaudi platform: static shapes, on a real or simulated card."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, get_args

from vllm import envs
from vllm.config.cache import CacheDType
from vllm.env import ranks as env_ranks
from vllm.env.bridge import has_vendor_library
from vllm.env.recipe_folder import RecipeFolder
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.platforms.habana import nodes
from vllm.platforms.habana.host import read_host
from vllm.platforms.interface import Platform

if TYPE_CHECKING:
    import torch

    from gaudi_sim.bridge import SimBridge
    from gaudi_sim.card.card import Recipe
    from vllm.platforms.habana.bridge import HabanaBridge
    from vllm.platforms.habana.card_reading import CardReading
    from vllm.platforms.habana.versions import Installed

logger = init_logger(__name__)

_FIRST_GENERATION = "GAUDI"
"""Name of cards of the first generation, which has no FP8 and less memory."""
_TOKENS_OF_A_READ = 176
"""A decode of so many tokens takes a Gaudi 2 as long to compute as to read the weights in bfloat16:
432 TFLOP/s by 2.46 TB/s. This is by its data sheet, and was not measured."""
_MIN_LOOKUP_DRAFTS, _MAX_LOOKUP_DRAFTS = 7, 16
"""With fewer drafts, texts that repeat themselves gain too little; with more, a launch whose drafts
are wrong computes too much for nothing."""


LOAD_ERRORS = (ImportError, OSError, AssertionError, AttributeError, RuntimeError)
"""Errors at the import of the vendor library: it asserts that it was built for this torch, may
expect a local version of it, and its own libraries may be missing."""


class HPUPlatform(Platform):
    """One Gaudi card."""

    name = "hpu"
    device_type = "hpu"
    default_block_size = 128
    default_max_num_seqs = 128
    default_max_num_batched_tokens = 8192
    default_max_step_ms = 0
    worker_class = "vllm.worker.hpu.worker:HPUWorker"
    is_asynchronous = True
    needs_static_shapes = True
    kv_cache_dtypes = get_args(CacheDType)
    has_own_memory = True
    # Compilers for Gaudi update a graph input in place, but copy it if it is written through a
    # view. So the cache is flat.
    has_flat_cache = True

    def __init__(self, open_bridge: "Callable[[], HabanaBridge]") -> None:
        """Set how the card is opened.

        Args:
            open_bridge: called once, when the card is first needed.
        """
        self._open_bridge = open_bridge

    @cached_property
    def bridge(self) -> "HabanaBridge":
        """The card. The first use loads torch and, for a real card, the driver."""
        return self._open_bridge()

    @property
    def is_simulated(self) -> bool:
        """Whether the card is simulated."""
        return simulated_card() is not None

    def check_present(self, num_ranks: int = 1) -> None:
        """Raise an error if there is no usable card, or not one for each rank."""
        if not self.is_simulated:
            _check_card()
            _check_num_cards(num_ranks)

    @property
    def collectives_backend(self) -> str:
        """Backend for collectives: hccl, or gloo between simulated cards."""
        return self.bridge.collectives_backend

    @property
    def before_collective(self) -> "Callable[[], None] | None":
        """Function that a rank calls before each exchange with other cards; None: nothing to call.

        In lazy mode it ends the recorded graph, because a collective that is recorded after
        operators that have not been launched may go wrong in some builds of the bridge. This also
        happens while an HPU graph is captured: the bridge allows it, and the graph gets one more
        part. In eager mode nothing is recorded, and a compiler would have to trace the call.
        """
        return self.bridge.mark_step if self.bridge.is_lazy else None

    def set_replica(self, index: int, count: int, world_size: int) -> None:
        """Use `world_size` cards of the machine, and hide the cards of other replicas.

        Raises:
            ConfigError: the machine has too few cards.
        """
        needed = count * world_size
        if simulated_card() is None and nodes.num_cards() < needed:
            raise ConfigError(
                f"data_parallel_size={count} with {world_size} cards each needs {needed} cards, "
                f"but this machine has {nodes.num_cards()}. Lower data_parallel_size"
            )
        env_ranks.export_replica(index, count, world_size)

    def set_rank(
        self,
        rank: int,
        world_size: int,
        local_rank: int | None = None,
        num_local_ranks: int | None = None,
    ) -> None:
        """Use the card of this rank.

        Raises:
            ConfigError: the machine has too few cards, or a card was opened before without support
                for collectives in graphs.
        """
        if world_size == 1:
            return
        num_local = world_size if num_local_ranks is None else num_local_ranks
        if simulated_card() is None:
            _check_num_cards(num_local)
        if "bridge" in self.__dict__ and not _wants_lazy_collectives(envs.get()):
            raise ConfigError(
                f"the engine needs {world_size} cards, but this process has opened its card for an "
                f"engine of one card already. Start this engine in a process of its own, or set "
                f"PT_HPU_ENABLE_LAZY_COLLECTIVES=true before the first one"
            )
        env_ranks.export_rank(rank, world_size, local_rank, num_local)

    def card_reader(self, num_ranks: int) -> "Callable[[], Sequence[CardReading]] | None":
        """Return the reader of real cards; None for a simulated card, which has no sensors."""
        if simulated_card() is not None or not nodes.num_cards():
            return None
        from vllm.platforms.habana.telemetry import CardReader

        return CardReader(env_ranks.modules_of(num_ranks)).read

    @property
    def ops_class(self) -> str:
        """Class of the operators that use the fused kernels of the bridge."""
        return "vllm.ops.hpu.operators:HPUOps"

    @property
    def quantizations(self) -> tuple[str, ...]:
        """Quantizations that the card multiplies with, or dequantizes for each matmul."""
        return ("fp8", "inc", "int8", "int4", "bitsandbytes")

    @property
    def can_run_draft_models(self) -> bool:
        return True

    def max_lookup_drafts(self, max_num_seqs: int) -> int:
        """Return the maximum number of lookup drafts.

        Each decode with drafts is padded to this number, so the cost of a step depends on it, and
        not on how many drafts there are.
        """
        hidden = _TOKENS_OF_A_READ // max_num_seqs - 1
        return min(_MAX_LOOKUP_DRAFTS, max(_MIN_LOOKUP_DRAFTS, hidden))

    @property
    def can_run_speculators(self) -> bool:
        return True

    def free_memory_bytes(self) -> int:
        """Return the free memory of this process's pool."""
        return self.bridge.memory_info().free_bytes

    def allocate_cache(self, shape: tuple[int, ...], dtype: "torch.dtype") -> "torch.Tensor":
        """Allocate zeroed memory on the card."""
        return self.bridge.zeros(shape, dtype)


class PlannedPlatform(HPUPlatform):
    """A simulated card for planning, to find out what an engine would do on it.

    Operators inside `HabanaBridge.dry_run` are not computed.

    Args:
        card: a key of `cost_model.cards.CARDS`.
        pool_bytes: memory of the card; None: the memory of a real one.
    """

    def __init__(self, card: str, pool_bytes: int | None = None) -> None:
        super().__init__(lambda: _open_planned(card, pool_bytes))

    @property
    def is_simulated(self) -> bool:
        return True

    def set_rank(
        self,
        rank: int,
        world_size: int,
        local_rank: int | None = None,
        num_local_ranks: int | None = None,
    ) -> None:
        """Accept any rank."""

    def activated(self) -> AbstractContextManager[None]:
        """Use the planned card as the device `hpu` of this process inside the context."""
        return self._simulation.activated()

    def recipes_launched(self) -> "AbstractContextManager[list[Recipe]]":
        """Yield a list to which each recipe is added that the card launches inside the context."""
        return self._simulation.card.recipes_launched()

    @property
    def _simulation(self) -> "SimBridge":
        from gaudi_sim.bridge import SimBridge

        assert isinstance(self.bridge, SimBridge)
        return self.bridge


def create_hpu_platform() -> HPUPlatform:
    """Create the platform of the simulated card if one is requested, else of the real one."""
    model = simulated_card()
    if model is not None:
        return HPUPlatform(lambda: _open_simulation(model))
    # Set now and not when the card is opened, because child processes need the settings earlier.
    _make_bridge_settings()
    return HPUPlatform(_open_card)


def simulated_card() -> str | None:
    """Return the name of the card that the environment asks to simulate; None if it does not."""
    settings = envs.get()
    return settings.VLLM_HPU_SIM or ("gaudi2" if settings.VLLM_USE_FAKE_HPU else None)


def missing_of_card() -> list[str]:
    """Return what this machine or container lacks for a Gaudi card; empty: it has the vendor
    library and a device node, neither of which is opened.
    """
    missing = []
    if not has_vendor_library():
        missing.append(
            f"the package habana_frameworks (habana-torch-plugin) is not installed for "
            f"{sys.executable}"
        )
    if not nodes.num_cards():
        missing.append(nodes.why_no_card(envs.of_launcher("HABANA_VISIBLE_DEVICES")))
    return missing


def _open_simulation(model: str) -> "HabanaBridge":
    from gaudi_sim.bridge import SimBridge
    from vllm.platforms.habana.parts import parse_names, parse_release

    settings = envs.get()
    logger.info(
        "The card is simulated (VLLM_HPU_SIM=%s): the CPU computes, and times say nothing about a "
        "card",
        model,
    )
    return SimBridge(
        model,
        is_lazy=bool(settings.PT_HPU_LAZY_MODE),
        is_strict=settings.VLLM_HPU_SIM_STRICT,
        is_vendor=settings.VLLM_HPU_SIM_VENDOR,
        has_lazy_collectives=_wants_lazy_collectives(settings),
        keeps_graph_tensors=settings.PT_HPUGRAPH_DISABLE_TENSOR_CACHE is False,
        recipe_cache=settings.PT_HPU_RECIPE_CACHE_CONFIG,
        release=parse_release(settings.VLLM_HPU_SIM_BRIDGE),
        absent=parse_names(settings.VLLM_HPU_SIM_ABSENT or ""),
    )


def plans_lazy_mode() -> bool:
    """Return whether a planned card runs in lazy mode, as it does unless PT_HPU_LAZY_MODE is 0."""
    return envs.get().PT_HPU_LAZY_MODE is not False


def _open_planned(card: str, pool_bytes: int | None) -> "HabanaBridge":
    from gaudi_sim.bridge import SimBridge

    settings = envs.get()
    return SimBridge(
        card,
        is_lazy=plans_lazy_mode(),
        has_lazy_collectives=True,
        keeps_graph_tensors=settings.PT_HPUGRAPH_DISABLE_TENSOR_CACHE is False,
        records_graphs=False,
        traces=False,
        pool_bytes=pool_bytes,
    )


def _check_card() -> None:
    if missing := missing_of_card():
        raise ConfigError(
            f"no usable Gaudi card: {'; and '.join(missing)}. Start from the vendor's image or "
            f"installation (README_GAUDI.md), or set VLLM_HPU_SIM=gaudi2 to run on a simulated card"
        )
    if (reason := nodes.why_not_permitted()) is not None:
        raise ConfigError(f"no usable Gaudi card: {reason}")


def _check_num_cards(num_ranks: int) -> None:
    """Check that this machine has a card for each of the ranks that run on it.

    Raises:
        ConfigError: it has fewer, or HABANA_VISIBLE_MODULES names fewer.
    """
    if num_ranks == 1:
        return
    if (count := nodes.num_cards()) < num_ranks:
        raise ConfigError(
            f"the engine needs {num_ranks} cards of this machine, one for each of the ranks "
            f"(tensor_parallel_size * pipeline_parallel_size), but there are only {count}. Lower "
            f"one of the two sizes. In a container, HABANA_VISIBLE_DEVICES chooses the cards"
        )
    env_ranks.rank_variables(0, num_ranks)  # checks HABANA_VISIBLE_MODULES


def _make_bridge_settings() -> None:
    """Set environment variables that the bridge reads during its import, unless the user has set
    them (`env/bridge`, and the modules of the cards).
    """
    _warn_of_visible_devices()
    env_ranks.export_modules(nodes.card_modules())
    is_imported = "habana_frameworks.torch" in sys.modules
    made = envs.export_bridge_settings()
    if is_imported and made:
        logger.warning(
            "habana_frameworks was imported before this engine (perhaps by torch), so it may "
            "ignore these settings: %s. Set PT_HPU_AUTOLOAD=0 before Python starts",
            ", ".join(f"{setting.name}={setting.value}" for setting in made),
        )


def _warn_of_visible_devices() -> None:
    """Warn if HABANA_VISIBLE_DEVICES names fewer cards than there are, or is no list of cards: then
    no container runtime has read it, and nothing else does.
    """
    devices = envs.of_launcher("HABANA_VISIBLE_DEVICES")
    names = nodes.chosen_cards(devices) or ()
    num_chosen = len(names) if all(name.isdecimal() for name in names) else 0
    has_effect = not names or num_chosen >= nodes.num_cards()
    if not has_effect and not envs.is_child() and not envs.is_set("HABANA_VISIBLE_MODULES"):
        logger.warning(
            "HABANA_VISIBLE_DEVICES=%s has no effect here, and %d cards are visible: it is read "
            "when a container is created (`docker run -e`), and not later. To choose cards "
            "here, set HABANA_VISIBLE_MODULES to their modules (`hl-smi -Q index,module_id -f csv` "
            "lists them)",
            *(devices, nodes.num_cards()),
        )


def _open_card() -> "HabanaBridge":
    _check_card()
    env_ranks.respell_modules()
    settings = envs.get()
    if (folder := RecipeFolder.parse(settings.PT_HPU_RECIPE_CACHE_CONFIG)) is not None:
        folder.make()
    # Set both variables before the import: the library reads them while it is imported.
    if _wants_lazy_collectives(settings):
        envs.export("PT_HPU_ENABLE_LAZY_COLLECTIVES", "true")
    if settings.PT_HPUGRAPH_DISABLE_TENSOR_CACHE is not None:
        is_off = settings.PT_HPUGRAPH_DISABLE_TENSOR_CACHE
        envs.export("PT_HPUGRAPH_DISABLE_TENSOR_CACHE", "1" if is_off else "0")
        if not is_off and settings.PT_HPU_LAZY_MODE is not False:
            logger.warning(
                "PT_HPUGRAPH_DISABLE_TENSOR_CACHE=0: HPU graphs keep their inputs and "
                "intermediate tensors, so fewer graphs fit into the memory. Unset it, so that "
                "graphs keep only their outputs"
            )
    bridge = _load_bridge(has_peers=settings.WORLD_SIZE > 1)
    envs.export_bridge_settings(bridge.is_lazy)
    described = envs.described_bridge_settings(bridge.is_lazy).items()
    logger.info(
        "Settings of the Habana bridge: %s", ", ".join(f"{n}={value}" for n, value in described)
    )
    _take_card(bridge)
    return bridge


def _load_bridge(*, has_peers: bool) -> "HabanaBridge":
    """Import the vendor library.

    Raises:
        ConfigError: it cannot be imported.
    """
    from vllm.platforms.habana import versions
    from vllm.platforms.habana.real import RealBridge

    installed = versions.find_installed()
    reason = installed.why_not_loadable(is_lazy=envs.get().PT_HPU_LAZY_MODE is True)
    if reason is not None:
        raise ConfigError(f"the Habana bridge (habana_frameworks) cannot be loaded: {reason}")
    if envs.of_launcher("RANK") in (None, "", "0"):  # all ranks would warn of the same
        _warn_of_machine(installed)
    try:
        return RealBridge(has_peers=has_peers)
    except LOAD_ERRORS as error:
        words = _own_words(error)
        raise ConfigError(
            f"the Habana bridge (habana_frameworks) cannot be loaded: {words}. Found: {installed}. "
            f"{versions.advice_for(words)}"
        ) from error


def _warn_of_machine(installed: "Installed") -> None:
    """Log warnings about software of several releases, and about settings of the host."""
    if (mismatch := installed.driver_mismatch()) is not None:
        logger.warning("the Gaudi software is of several releases: %s", mismatch)
    for problem in read_host().problems(envs.get().WORLD_SIZE):
        logger.warning("this machine is not set up for Gaudi: %s", problem)


def _take_card(bridge: "HabanaBridge") -> None:
    """Let the bridge take a card. It does so at the first use, so this asks for the memory.

    Raises:
        ConfigError: there is no free card, the driver refuses, or the card is of another kind.
    """
    from vllm.platforms.habana.bridge import KNOWN_CARDS

    try:
        bridge.memory_info()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"no Gaudi card can be opened: {_own_words(error)}. {_why_not_taken()}"
        ) from error
    name = bridge.device_name
    if name == _FIRST_GENERATION:
        raise ConfigError(
            f"the card is a {name} of the first generation, and this engine runs on Gaudi 2 and "
            f"Gaudi 3 only. Set VLLM_TARGET_DEVICE=cpu to run on the CPU"
        )
    if name not in KNOWN_CARDS:
        logger.warning("the card is a %r, which is not known: it is used like a Gaudi 3", name)


def _why_not_taken() -> str:
    """Return the likely reasons that the bridge could not take a card, as a sentence."""
    from vllm.platforms.habana import versions

    visible = env_ranks.named_modules()
    chosen = f", and HABANA_VISIBLE_MODULES={','.join(visible)} allows no other" * bool(visible)
    found = nodes.card_modules()
    if found and not {int(module) for module in visible} <= set(found):
        chosen += f" (the cards here are the modules {', '.join(map(str, found))})"
    mismatch = versions.find_installed().driver_mismatch()
    if holders := nodes.holders():
        return f"Each process needs a card of its own{chosen}: {'; '.join(holders)}. End them first"
    if mismatch is not None:
        return f"{mismatch[:1].upper()}{mismatch[1:]}"
    return (
        f"Another process may use the card (`hl-smi` lists processes; each needs a card of its "
        f"own{chosen}), or the driver is not of the release of the Gaudi software of this container"
    )


def _own_words(error: BaseException) -> str:
    """Return the first line of an error of the vendor library, without its list of calls."""
    lines = str(error).strip().splitlines() or [repr(error)]
    return lines[0].strip().rstrip(".:")


def _wants_lazy_collectives(settings: envs.Envs) -> bool:
    """Return whether collectives inside an HPU graph must be recorded, because there are several
    processes.
    """
    return settings.WORLD_SIZE > 1 or bool(settings.PT_HPU_ENABLE_LAZY_COLLECTIVES)


def absent_parts() -> list[str]:
    """Return the parts of `habana.parts.PARTS` that the bridge of this machine does not have.

    Loads the vendor library, and opens no card.

    Raises:
        ImportError: the library is missing, or another of `LOAD_ERRORS`: it cannot be loaded.
    """
    from vllm.platforms.habana import parts

    settings = envs.get()
    if simulated_card() is not None:
        absent = parts.parse_names(settings.VLLM_HPU_SIM_ABSENT or "")
        return parts.absent_of_release(parts.parse_release(settings.VLLM_HPU_SIM_BRIDGE), absent)
    parts.load_vendor("core")  # the import registers the operators
    found = parts.find_parts()
    return [name for name in parts.PARTS if name not in found]
