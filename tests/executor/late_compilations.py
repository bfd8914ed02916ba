"""Methods that tests add to the workers of cards."""

from typing import Any, NoReturn


class LateCompilations:
    """An extension of the worker, for --worker-extension-cls."""

    def late_compilations(self) -> int:
        """Return the number of graphs of this rank that were compiled after its warm-up."""
        count: int = self.stats().num_late_compilations  # type: ignore[attr-defined]
        return count

    def break_encoder(self, rank: int, is_broken: bool) -> None:
        """Let one rank fail to encode images, or let it encode again."""
        encoder = self.runner.encoder  # type: ignore[attr-defined]
        vars(encoder).pop("encode", None)
        if is_broken and self.tp.rank == rank:  # type: ignore[attr-defined]
            encoder.encode = _fail

    def warmed_buckets(self) -> list[str]:
        """Return the buckets of this rank's catalog in order, and whether each is warmed up."""
        catalog = self.runner.launches.planner.catalog  # type: ignore[attr-defined]
        buckets = *catalog.prefill, *catalog.decode
        return [f"{bucket}: {catalog.is_warmed(bucket)}" for bucket in buckets]


def _fail(items: Any) -> NoReturn:
    raise RuntimeError("broken")
