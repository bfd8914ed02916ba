"""Define the name, id and path of a LoRA adapter in a request. Independent of weights."""

from dataclasses import dataclass

from vllm.errors import RequestError


@dataclass(frozen=True)
class LoRARequest:
    """The LoRA adapter of a request.

    Two objects are equal if their names are.

    Attributes:
        lora_name: the name of the adapter.
        lora_int_id: id of the adapter, 1 or larger; different for every adapter.
        lora_path: folder or Hugging Face name of its files.
        lora_local_path: older name of `lora_path`, which is used if that is empty.
        long_lora_max_len: longest request in tokens, for an adapter that extends the context.
        base_model_name: the model that the adapter was made for.

    Raises:
        RequestError: (a ValueError) the id is below 1, or there is no path.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_local_path: str | None = None
    long_lora_max_len: int | None = None
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise RequestError(
                f"lora_int_id must be at least 1, got {self.lora_int_id}", param="lora_int_id"
            )
        if not self.path:
            raise RequestError(
                f"lora_path of the adapter {self.lora_name!r} is empty: name the folder of its "
                f"files",
                param="lora_path",
            )

    @property
    def name(self) -> str:
        """The name of the adapter."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """The id of the adapter."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """Folder or Hugging Face name of the adapter's files."""
        return self.lora_path or self.lora_local_path or ""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LoRARequest):
            return NotImplemented
        return self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)
