"""Track requests whose resources (grammar, adapter, blocks of other engines) are being loaded
before they are scheduled, and the adapters that requests hold until they end.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from vllm.messages import AdapterRef, EngineRequest, Finished, FinishReason


class RequestResources:
    """Tracks the resources that requests need in addition to the model.

    Args:
        release: tells the workers which requests with an adapter or images have ended.
    """

    def __init__(self, release: Callable[[Sequence[str]], None]) -> None:
        self._release = release
        self._loading: dict[str, tuple[EngineRequest, Future[str | None]]] = {}
        self._refused: dict[str, Finished] = {}
        self._adapters: dict[str, AdapterRef] = {}
        """Adapter by the id of a request that has not ended."""
        self._with_media: set[str] = set()
        """Requests with images that have not ended."""
        self._uses: Counter[str] = Counter()
        """Key of an adapter -> requests that have not ended."""
        self._names: dict[str, str] = {}
        """Name by the key of an adapter in use."""

    def __len__(self) -> int:
        """Return the number of requests that are not scheduled yet."""
        return len(self._loading) + len(self._refused)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loading or request_id in self._refused

    def hold(self, request: EngineRequest) -> None:
        """Record the resources that a request holds until it ends."""
        if request.adapter is not None:
            adapter = self._adapters[request.request_id] = request.adapter
            self._uses[adapter.key] += 1
            self._names[adapter.key] = adapter.name
        if request.media:
            self._with_media.add(request.request_id)

    def adapter_names(self, running: Mapping[str, int]) -> tuple[list[str], list[str]]:
        """Return the names of the adapters of running requests, and of waiting requests.

        Args:
            running: key of an adapter -> number of running requests with it.
        """
        waiting = [key for key, count in self._uses.items() if count > running.get(key, 0)]
        found = (sorted(self._names[key] for key in keys) for keys in (running, waiting))
        return next(found), next(found)

    def await_load(self, request: EngineRequest, future: "Future[str | None]") -> None:
        """Hold a request back until its resources are loaded.

        Args:
            request: request that is not scheduled yet.
            future: done when they are loaded; its result is the reason why the request cannot run,
                or None.
        """
        self._loading[request.request_id] = request, future

    def take_loaded(self, timeout_s: float) -> list[EngineRequest]:
        """Return the requests that can be scheduled now.

        Args:
            timeout_s: seconds to wait for one of them.
        """
        if timeout_s and self._loading:
            futures = [future for _, future in self._loading.values()]
            wait(futures, timeout=timeout_s, return_when=FIRST_COMPLETED)
        loaded = []
        for request_id, (request, future) in list(self._loading.items()):
            if not future.done():
                continue
            del self._loading[request_id]
            if (reason := future.result()) is None:
                loaded.append(request)
            else:
                end = Finished(FinishReason.ERROR, error=reason, is_refused=True)
                self._refused[request_id] = end
        return loaded

    def take_refused(self) -> dict[str, Finished]:
        """Return the requests that cannot run. Each is returned once."""
        refused, self._refused = self._refused, {}
        self.end(refused)
        return refused

    def end(self, request_ids: Iterable[str]) -> None:
        """Release the resources of finished requests, some of which may have none."""
        ended = list(request_ids)
        for request_id in ended:
            self._loading.pop(request_id, None)
            self._refused.pop(request_id, None)
        held = [each for each in ended if each in self._adapters or each in self._with_media]
        self._with_media.difference_update(held)
        for request_id in held:
            if (adapter := self._adapters.pop(request_id, None)) is None:
                continue
            key = adapter.key
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key], self._names[key]
        if held:
            self._release(held)
