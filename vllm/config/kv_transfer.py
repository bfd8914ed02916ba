"""Define settings for storing KV blocks outside of the KV cache, and for sharing them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, Literal

from vllm.config.fields import check_at_least, check_one_of
from vllm.errors import ConfigError

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]

_EXTRA_KEYS = {
    "OffloadingConnector": ("folder", "folder_bytes"),
    "SharedStorageConnector": ("shared_storage_path", "folder_bytes"),
    "TCPConnector": ("peers", "timeout_s"),
}
_CONNECTORS = (
    "OffloadingConnector (host memory and files), SharedStorageConnector (a folder that several "
    "engines share), TCPConnector (the memory of other engines)"
)
_MAX_PORT = 65535
_GIB = 1 << 30
_DAY_S = 86400


@dataclass(frozen=True, kw_only=True)
class KVTransferConfig:
    """The value of `kv_transfer_config`."""

    kv_connector: str
    """Where KV blocks are kept. OffloadingConnector: host memory and a folder;
    SharedStorageConnector: a folder that several engines share; TCPConnector: the memory of other
    engines; or a class of `kv_connector_module_path`."""

    kv_role: KVRole = "kv_both"
    """Direction. kv_producer: only saves blocks; kv_consumer: only loads blocks; kv_both: saves and
    loads."""

    kv_buffer_device: str = "cpu"
    """Device of the buffer; only cpu: blocks are buffered in host memory."""

    kv_buffer_size: float = 1e9
    """Bytes of host memory for blocks."""

    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the connector. OffloadingConnector, SharedStorageConnector: folder (or
    shared_storage_path) and folder_bytes. TCPConnector: peers and timeout_s."""

    kv_connector_module_path: str | None = None
    """Module of a connector class that is not part of this package."""

    kv_ip: str = "127.0.0.1"
    """TCPConnector: the address at which an engine that saves listens; a kv_consumer connects to
    it, unless it has `peers`."""

    kv_port: int = 14579
    """Port of `kv_ip`. With several replicas, replica n listens on this port + n."""

    engine_id: str | None = None
    """Accepted without effect, like kv_rank and kv_parallel_size: engines find each other by
    address."""

    kv_rank: int | None = None
    kv_parallel_size: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.kv_connector, str):
            raise ConfigError(f"kv_connector must be a string, got {self.kv_connector!r}")
        check_one_of(self, "kv_role", ("kv_producer", "kv_consumer", "kv_both"))
        check_one_of(self, "kv_buffer_device", ("cpu",))
        size = self.kv_buffer_size
        is_number = isinstance(size, int | float) and not isinstance(size, bool)
        if not is_number or not 0 <= size < inf:
            raise ConfigError(f"kv_buffer_size must be a positive number of bytes, got {size!r}")
        if not isinstance(self.kv_connector_extra_config, Mapping):
            raise ConfigError(
                f"kv_connector_extra_config must be an object, got "
                f"{self.kv_connector_extra_config!r}"
            )
        if not isinstance(self.kv_ip, str) or not _is_host(self.kv_ip):
            raise ConfigError(f"kv_ip must be an address, got {self.kv_ip!r}")
        port = self.kv_port
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= _MAX_PORT:
            raise ConfigError(f"kv_port must be an integer from 0 to {_MAX_PORT}, got {port!r}")
        if self.kv_connector_module_path is None:
            if self.kv_connector not in _EXTRA_KEYS:
                raise ConfigError(
                    f"kv_connector must be one of {_CONNECTORS}, got {self.kv_connector!r}. Set "
                    f"kv_connector_module_path as well if it is a class of your own"
                )
            self._check_extra()

    def _check_extra(self) -> None:
        extra, known = self.kv_connector_extra_config, _EXTRA_KEYS[self.kv_connector]
        if unknown := [name for name in extra if name not in known]:
            raise ConfigError(
                f"kv_connector_extra_config of {self.kv_connector} has the unknown key "
                f"{', '.join(map(repr, unknown))}; accepted: {', '.join(known)}"
            )
        if self.kv_connector == "TCPConnector":
            self._check_peers()
        else:
            self._check_folder(known[0])

    def _check_peers(self) -> None:
        peers = self.kv_connector_extra_config.get("peers", [])
        if not isinstance(peers, list) or not all(isinstance(each, str) for each in peers):
            raise ConfigError(
                f"kv_connector_extra_config: peers must be a list of HOST:PORT, got {peers!r}"
            )
        for each in peers:
            _parse_address(each)
        limit = self.timeout_s
        is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if not is_number or not 0 < limit <= _DAY_S:
            raise ConfigError(
                f"kv_connector_extra_config: timeout_s must be a number above 0, at most {_DAY_S}, "
                f"got {limit!r}"
            )

    def _check_folder(self, key: str) -> None:
        folder = self.kv_connector_extra_config.get(key)
        if folder is None and self.kv_connector == "SharedStorageConnector":
            raise ConfigError(
                "SharedStorageConnector needs a folder: kv_connector_extra_config "
                '{"shared_storage_path": "/path"}'
            )
        if folder is not None and (not isinstance(folder, str) or not folder):
            raise ConfigError(f"kv_connector_extra_config: {key} must be a path (a string)")
        size = self.folder_bytes
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"kv_connector_extra_config: folder_bytes must be an integer of at least 1, got "
                f"{size!r}"
            )

    @property
    def folder(self) -> str | None:
        """Folder for blocks; None: blocks are stored only in host memory."""
        extra = self.kv_connector_extra_config
        folder: str | None = extra.get("shared_storage_path", extra.get("folder"))
        return folder

    @property
    def folder_bytes(self) -> int:
        """Approximate limit for the bytes of all files in the folder. Above it, the least recently
        used files are removed."""
        size: int = self.kv_connector_extra_config.get("folder_bytes", 10 * _GIB)
        return size

    @property
    def peers(self) -> list[tuple[str, int]]:
        """(host, port) of the engines from which blocks are requested."""
        if not self.loads:
            return []
        given = self.kv_connector_extra_config.get("peers")
        if given is None:
            return [] if self.saves else [(self.kv_ip, self.kv_port)]
        return [_parse_address(each) for each in given]

    @property
    def timeout_s(self) -> float:
        """Maximum number of seconds to receive the blocks of a prompt from one engine."""
        limit: float = self.kv_connector_extra_config.get("timeout_s", 10.0)
        return limit

    @property
    def saves(self) -> bool:
        """Whether blocks are saved."""
        return self.kv_role != "kv_consumer"

    @property
    def loads(self) -> bool:
        """Whether blocks are loaded."""
        return self.kv_role != "kv_producer"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "KVTransferConfig":
        """Read the value of `kv_transfer_config`.

        Raises:
            ConfigError: a key is not known or is missing, or its value is wrong.
        """
        names = [f.name for f in fields(cls)]
        if unknown := [name for name in values if name not in names]:
            raise ConfigError(
                f"kv_transfer_config has the unknown key {', '.join(map(repr, unknown))}; "
                f"accepted: {', '.join(names)}"
            )
        if "kv_connector" not in values:
            raise ConfigError(f"kv_transfer_config needs kv_connector; accepted: {_CONNECTORS}")
        try:
            config = cls(**values)
            check_at_least(config, 1, "kv_parallel_size")
        except ConfigError as error:
            raise ConfigError(f"kv_transfer_config: {error}") from None
        return config


def _parse_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT or [IPv6]:PORT; tcp:// may be before it."""
    host, colon, port = text.removeprefix("tcp://").rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) <= _MAX_PORT
    if not (colon and is_port and _is_host(host)):
        raise ConfigError(
            f"kv_connector_extra_config: peers has {text!r}; expected HOST:PORT, such as "
            f"10.0.0.5:14579"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_host(text: str) -> bool:
    """Return whether the string can be a host name, so that the system may be asked for its
    address.
    """
    try:
        return bool(text.encode("idna"))
    except UnicodeError:
        return False


@dataclass(frozen=True, kw_only=True)
class ConnectorConfig:
    """Settings for KV blocks outside of the KV cache."""

    kv_transfer_config: Mapping[str, Any] = field(default_factory=dict)
    """Keep KV blocks in host memory and files, and share them with other engines (JSON):
    kv_connector (OffloadingConnector, SharedStorageConnector or TCPConnector), kv_role,
    kv_buffer_size, kv_ip, kv_port, kv_connector_extra_config; see docs/kv_transfer.md."""

    def __post_init__(self) -> None:
        if self.kv_transfer_config:
            KVTransferConfig.from_mapping(self.kv_transfer_config)  # raises if it is invalid

    @property
    def kv_transfer(self) -> KVTransferConfig | None:
        """`kv_transfer_config` with its defaults; None if it is not given."""
        given = self.kv_transfer_config
        return KVTransferConfig.from_mapping(given) if given else None
