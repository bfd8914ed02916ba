"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from vllm.entrypoints.openai.protocol.base import Int32, RequestBody


class LoadLoRAAdapterRequest(RequestBody):
    """An adapter to be served under a name of its own."""

    lora_name: str
    lora_path: str


class UnloadLoRAAdapterRequest(RequestBody):
    """An adapter that is not to be served any more."""

    lora_name: str
    lora_int_id: Int32 | None = None
