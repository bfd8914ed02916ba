"""The finite set of bucket shapes, and the search for the cheapest one for a batch.

Not thread-safe: marking buckets as warm and looking up must not run at the same time.
"""

from collections.abc import Callable, Iterable

from vllm.bucketing.bucket import Bucket, Phase
from vllm.bucketing.catalog.cover_index import make_index
from vllm.cost_model.padded import decode_cost, prefill_cost

Cost = Callable[[Bucket], float]


def padded_cost(bucket: Bucket) -> int:
    """Return the relative cost of a forward pass of this shape, to compare buckets of one phase."""
    if bucket.phase is Phase.DECODE:
        return decode_cost(bucket.num_tokens, bucket.blocks)
    return prefill_cost(bucket.num_tokens, bucket.query_len, bucket.blocks)


class Catalog:
    """The buckets of both phases. The set never changes, only which of them are warmed up.

    Args:
        prefill: buckets of phase prefill, in any order.
        decode: buckets of phase decode, in any order.
        cost: cost of a padded forward pass. Of buckets with equal cost the smaller one is used.
    """

    def __init__(
        self, prefill: Iterable[Bucket], decode: Iterable[Bucket], cost: Cost = padded_cost
    ) -> None:
        self.prefill = tuple(sorted(set(prefill)))
        self.decode = tuple(sorted(set(decode)))
        for phase, buckets in ((Phase.PREFILL, self.prefill), (Phase.DECODE, self.decode)):
            wrong = [bucket for bucket in buckets if bucket.phase is not phase]
            if wrong:
                raise ValueError(f"{wrong[0]} is not a {phase!s} bucket")
        self._cost = cost
        by_rank = [
            sorted(buckets, key=lambda bucket: (cost(bucket), bucket))
            for buckets in (self.prefill, self.decode)
        ]
        self._rank = {b: rank for ranked in by_rank for rank, b in enumerate(ranked)}
        self._all = [make_index(ranked) for ranked in by_rank]
        self._warmed_only = [make_index(ranked) for ranked in by_rank]
        self._warmed: set[Bucket] = set()
        for index, ranked in zip(self._all, by_rank, strict=True):
            index.add(range(len(ranked)))

    def __len__(self) -> int:
        return len(self._rank)

    def __contains__(self, bucket: object) -> bool:
        return bucket in self._rank

    def fit(
        self, phase: Phase, batch: int, query_len: int, blocks: int, warmed_only: bool = False
    ) -> Bucket | None:
        """Return the cheapest bucket into which a batch fits, or None. Takes a microsecond or two.

        Args:
            phase: prefill or decode.
            batch: number of sequences.
            query_len: tokens of the longest sequence; 1 for a decode without drafts.
            blocks: context blocks of the longest (prefill), block references of all (decode).
            warmed_only: consider only buckets that are warmed up, which may be larger.
        """
        return (self._warmed_only if warmed_only else self._all)[phase].find(
            batch, query_len, blocks
        )

    # ---- warm-up --------------------------------------------------------------------------

    @property
    def warmed(self) -> frozenset[Bucket]:
        """The buckets that are warmed up."""
        return frozenset(self._warmed)

    def is_warmed(self, bucket: Bucket) -> bool:
        """Return whether a forward pass of this bucket compiles nothing."""
        return bucket in self._warmed

    def mark_warmed(self, buckets: Iterable[Bucket]) -> None:
        """Mark buckets as warmed up; from now on `warmed_only` finds them.

        Raises:
            ValueError: one is not in the catalog.
        """
        new = set(buckets) - self._warmed
        self._check_known(new)
        for phase in Phase:
            self._warmed_only[phase].add(self._rank[b] for b in new if b.phase is phase)
        self._warmed |= new

    # ---- other sets -----------------------------------------------------------------------

    def without(self, buckets: Iterable[Bucket]) -> "Catalog":
        """Return the catalog without some buckets; the others stay warmed up.

        Raises:
            ValueError: one is not in the catalog.
        """
        removed = set(buckets)
        self._check_known(removed)
        return self._with(
            [b for b in self.prefill if b not in removed],
            [b for b in self.decode if b not in removed],
        )

    def with_buckets(self, buckets: Iterable[Bucket]) -> "Catalog":
        """Return the catalog with further buckets, which are not warmed up yet."""
        new = list(buckets)
        return self._with(
            [*self.prefill, *(b for b in new if b.phase is Phase.PREFILL)],
            [*self.decode, *(b for b in new if b.phase is Phase.DECODE)],
        )

    def _with(self, prefill: Iterable[Bucket], decode: Iterable[Bucket]) -> "Catalog":
        catalog = Catalog(prefill, decode, self._cost)
        catalog.mark_warmed(bucket for bucket in self._warmed if bucket in catalog)
        return catalog

    def _check_known(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            if bucket not in self._rank:
                raise ValueError(f"{bucket} is not in the catalog")
