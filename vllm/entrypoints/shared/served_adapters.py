"""Manage the LoRA adapters of a server, by the name that requests use as `model`."""

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
    """Manages the adapters that a server offers, by the name that requests use as `model`.

    Args:
        modules: values of --lora-modules: name=path, or JSON with name, path and base_model_name;
            or parsed ones.
        names: names of the base model, which no adapter may have.
        max_rank: largest rank of an adapter.
        folder: folder whose subfolders are adapters, which are loaded when a request first names
            them; or None.

    Raises:
        RequestError: a module is malformed, or its files cannot be used.
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
        """Return the adapter with this name; None if there is none. It may be a folder that was not
        used yet.

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
            RequestError: the folder or repository does not exist.
        """
        await asyncio.to_thread(adapter_folder, LoRARequest(path, 1, path))

    def check(
        self, name: str, path: str, base: str | None = None, *, replaces: bool = False
    ) -> LoRARequest:
        """Check whether an adapter can be served, and return the object that requests for it use.
        Its weights are not read.

        Args:
            name: name of the adapter.
            path: path of its files.
            base: model for which it was made.
            replaces: whether it may replace an adapter with this name, whose number it keeps.

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
        """Start to serve an adapter that `check` returned.

        Raises:
            RequestError: another adapter was added under its name meanwhile.
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
        """Stop serving an adapter, and return it. Running requests keep it.

        Raises:
            NotFoundError: no adapter has this name.
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
