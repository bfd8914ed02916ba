"""The LoRA adapters of a server, by the name that requests give as `model`."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vllm.errors import NotFoundError, RequestError
from vllm.lora.files import CONFIG_FILE, adapter_folder, check_files
from vllm.lora.request import LoRARequest


class LoRAModulePath(NamedTuple):
    """An adapter to be served: its name, the path of its files, and the model it was made for."""

    name: str
    path: str
    base_model_name: str | None = None


class ServedAdapters:
    """The adapters that a server offers, by the name that requests give as `model`.

    Args:
        modules: name=path, or JSON with name, path and base_model_name; or read already.
        names: of the base model; no adapter may have one of them.
        max_rank: of an adapter.
        folder: whose folders are adapters that are offered when a request first names them; None:
            there is none.

    Raises:
        RequestError: a module is written wrongly, or its files cannot be used.
    """

    def __init__(
        self,
        modules: Sequence[str | LoRAModulePath],
        names: Sequence[str],
        max_rank: int,
        folder: str | None = None,
    ) -> None:
        self._folder = None if folder is None else Path(folder).expanduser()
        self._names = names
        self._max_rank = max_rank
        self._by_name: dict[str, LoRARequest] = {}
        self._next_id = 1
        for module in modules:
            read = module if isinstance(module, LoRAModulePath) else _read_module(module)
            self.offer(self.check(*read))

    @property
    def all(self) -> list[LoRARequest]:
        """All adapters, in the order in which they were added."""
        return list(self._by_name.values())

    def find(self, name: str | None) -> LoRARequest | None:
        """Return the adapter with this name, which may be a folder that was not used yet; None if
        there is none.

        Raises:
            RequestError: the files in its folder cannot be used.
        """
        name = name or ""
        if name not in self._by_name and self._has_folder(name):
            self.offer(self.check(name, str(self._folder / name)))  # type: ignore[operator]
        return self._by_name.get(name)

    def _has_folder(self, name: str) -> bool:
        is_plain = name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}
        if self._folder is None or not is_plain or name in self._names or len(name) > 255:
            return False
        return (self._folder / name / CONFIG_FILE).is_file()

    @staticmethod
    async def fetch(path: str) -> None:
        """Download an adapter, if its path is a name on the hub, without blocking the event loop.

        Raises:
            RequestError: there is no such folder or repository.
        """
        await asyncio.to_thread(adapter_folder, LoRARequest(path, 1, path))

    def check(
        self, name: str, path: str, base: str | None = None, *, replaces: bool = False
    ) -> LoRARequest:
        """Check whether an adapter can be offered, and return what requests for it will name; its
        weights are not read.

        Args:
            name: of the adapter.
            path: of its files.
            base: the model that it was made for.
            replaces: an adapter of this name may be there; it keeps its number.

        Raises:
            RequestError: the name is in use, or the files are missing or wrong.
        """
        self._check_name(name, replaces=replaces)
        before = self._by_name.get(name)
        if before is None:
            number, self._next_id = self._next_id, self._next_id + 1
        else:
            number = before.lora_int_id
        adapter = LoRARequest(name, number, path, base_model_name=base)
        check_files(adapter_folder(adapter), self._max_rank)
        return adapter

    def offer(self, adapter: LoRARequest) -> None:
        """Offer an adapter that `check` has made.

        Raises:
            RequestError: another one was offered under its name meanwhile.
        """
        before = self._by_name.get(adapter.lora_name)
        is_same = before is not None and before.lora_int_id == adapter.lora_int_id
        self._check_name(adapter.lora_name, replaces=is_same)
        self._by_name[adapter.lora_name] = adapter

    def _check_name(self, name: str, *, replaces: bool) -> None:
        if not name or name in self._names or (name in self._by_name and not replaces):
            raise RequestError(
                f"the name {name!r} of a LoRA adapter must not be empty, and no other model or "
                f"adapter may have it. To replace an adapter of this name, send load_inplace=true",
                param="lora_name",
            )

    def remove(self, name: str) -> LoRARequest:
        """Offer an adapter no longer; requests that run keep it. Returns it.

        Raises:
            NotFoundError: there is none with this name.
        """
        if name not in self._by_name:
            raise NotFoundError(f"The adapter `{name:.200}` does not exist.", param="lora_name")
        return self._by_name.pop(name)


def _read_module(text: str) -> LoRAModulePath:
    """Read one value of --lora-modules."""
    if not text.lstrip().startswith("{"):
        name, equals, path = text.partition("=")
        if equals and name and path:
            return LoRAModulePath(name, path)
    else:
        try:
            given = json.loads(text)
        except ValueError as error:
            raise RequestError(f"{text!r} is not JSON: {error}") from None
        known = {"name", "path", "base_model_name"}
        values = [given.get("name"), given.get("path"), given.get("base_model_name") or ""]
        if given.keys() <= known and all(isinstance(value, str) for value in values):
            return LoRAModulePath(values[0], values[1], values[2] or None)
    raise RequestError(
        f'an adapter must be written as name=path or {{"name": "...", "path": "..."}}, got {text!r}'
    )
