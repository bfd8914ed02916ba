"""Choose a connector by name."""

from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.interface import KVConnector
from vllm.distributed.kv_transfer.tcp import TCPConnector
from vllm.distributed.kv_transfer.tiers import TieredConnector
from vllm.errors import ConfigError
from vllm.utils.imports import load_user_class

_CONNECTORS: dict[str, type[KVConnector]] = {
    "OffloadingConnector": TieredConnector,
    "SharedStorageConnector": TieredConnector,
    "TCPConnector": TCPConnector,
}


def make_connector(config: KVTransferConfig) -> KVConnector:
    """Create the connector that a config asks for.

    Raises:
        ConfigError: a class of the user, a folder or an address cannot be used.
    """
    if config.kv_connector_module_path is None:
        return _CONNECTORS[config.kv_connector](config)
    path = f"{config.kv_connector_module_path}.{config.kv_connector}"
    kind = load_user_class("kv_connector", path)
    if not issubclass(kind, KVConnector):
        raise ConfigError(
            f"kv_connector {path!r} is not a subclass of vllm.distributed.kv_transfer.KVConnector"
        )
    return kind(config)
