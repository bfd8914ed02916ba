"""The LoRA adapters of a server, by the name that requests give as `model`."""

import json
from collections.abc import Sequence

from vllm.errors import NotFoundError, RequestError
from vllm.lora.files import adapter_folder, check_files
from vllm.lora.request import LoRARequest


class ServedAdapters:
    """The adapters that a server offers, by the name that requests give as `model`.

    Args:
        modules: name=path, or JSON with name, path and base_model_name.
        names: of the base model; no adapter may have one of them.
        max_rank: of an adapter.

    Raises:
        RequestError: a module is written wrongly, or its files cannot be used.
    """

    def __init__(self, modules: Sequence[str], names: Sequence[str], max_rank: int) -> None:
        self._names = names
        self._max_rank = max_rank
        self._by_name: dict[str, LoRARequest] = {}
        self._next_id = 1
        for module in modules:
            self.add(*_read_module(module))

    @property
    def all(self) -> list[LoRARequest]:
        """All adapters, in the order in which they were added."""
        return list(self._by_name.values())

    def find(self, name: str | None) -> LoRARequest | None:
        """The adapter with this name; None if there is none."""
        return self._by_name.get(name or "")

    def add(self, name: str, path: str, base: str | None = None) -> None:
        """Offer an adapter.

        Raises:
            RequestError: the name is in use, or the files are missing or wrong.
        """
        if not name or name in self._by_name or name in self._names:
            raise RequestError(
                f"the name {name!r} of a LoRA adapter must not be empty, and no other model or "
                f"adapter may have it",
                param="lora_name",
            )
        adapter = LoRARequest(name, self._next_id, path, base_model_name=base)
        check_files(adapter_folder(adapter), self._max_rank)
        self._by_name[name] = adapter
        self._next_id += 1

    def remove(self, name: str) -> None:
        """Offer an adapter no longer; requests that run keep it.

        Raises:
            NotFoundError: there is none with this name.
        """
        if name not in self._by_name:
            raise NotFoundError(f"The adapter `{name:.200}` does not exist.", param="lora_name")
        del self._by_name[name]


def _read_module(text: str) -> tuple[str, str, str | None]:
    """Name, path and base model of one value of --lora-modules."""
    if not text.lstrip().startswith("{"):
        name, equals, path = text.partition("=")
        if equals and name and path:
            return name, path, None
    else:
        try:
            given = json.loads(text)
        except ValueError as error:
            raise RequestError(f"{text!r} is not JSON: {error}") from None
        known = {"name", "path", "base_model_name"}
        values = [given.get("name"), given.get("path"), given.get("base_model_name") or ""]
        if given.keys() <= known and all(isinstance(value, str) for value in values):
            return values[0], values[1], values[2] or None
    raise RequestError(
        f'an adapter is written as name=path or {{"name": "...", "path": "..."}}, got {text!r}'
    )
