"""A method that tests add to the workers of cards."""


class LateCompilations:
    """For --worker-extension-cls."""

    def late_compilations(self) -> int:
        """Graphs of this rank that were compiled after its warm-up."""
        count: int = self.stats().num_late_compilations  # type: ignore[attr-defined]
        return count
