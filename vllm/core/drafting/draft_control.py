"""Decide how many draft tokens are worthwhile, from their acceptance rate and the time of steps."""

from collections.abc import Sequence

from vllm.messages import DraftStats, IntArray
from vllm.request import Request

_MEMORY = 0.98
"""Weight of the past, per step, in the fit of the time of a step."""
_LEARNING = 0.15
"""Weight of one draft in the acceptance rate of its request."""
_INITIAL_ACCURACY = 0.8
"""Acceptance rate of a request without any evidence. The rate of a request without drafts returns
to it, so that drafts are tried again."""
_MAX_EVIDENCE = 8
"""More tokens than this that agree are no further evidence."""
_LEARNING_OF_ALL = 0.01
"""Weight of one draft in the acceptance rate that a new request is expected to have."""
_RECOVERY = 0.004
"""Fraction of the difference by which the rate of a request without drafts returns in one step."""
_UNKNOWN_COST = 0.1
"""Cost of a token before steps of different sizes were seen."""
_MIN_STEPS = 3
"""Steps that have to be measured before their time is known."""
_PLAIN_AT_FIRST, _PLAIN_PERIOD = 4, 64
"""While drafts are worthwhile, one step of every `_PLAIN_PERIOD` has none, to measure its time;
while that time is not known, one of every `_PLAIN_AT_FIRST`."""
_FIRST_WAIT, _LONGEST_WAIT = 16, 4096
"""While drafts are not worthwhile: first and largest number of steps until they are measured again.
It doubles each time."""
_FEW = 8
"""So many steps in a row whose drafts would not pay are no reason to pause: the next ones may have
better drafts."""
_SHORT_PAUSE = 2
_LARGEST_SURPRISE = 2.0
"""A step counts as at most so many times longer than expected: a process that was interrupted tells
nothing about drafts."""
_MIN_COST, _LARGEST_COST = 0.03, 0.95
"""Limits of a measured cost, as measurements are noisy."""


class StepCost:
    """Fits the time of decode steps as t0 + t1 * tokens (least squares; older steps count less)."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._first: list[tuple[int, float]] = []
        """Steps before there are enough of them to tell which ones were interrupted."""

    def record(self, num_tokens: int, seconds: float) -> None:
        """Add the measured time of a step to the fit."""
        expected = self.seconds(num_tokens)
        if expected is not None:
            self._add(num_tokens, min(seconds, _LARGEST_SURPRISE * expected))
            return
        self._first.append((num_tokens, seconds))
        if len(self._first) < _MIN_STEPS:
            return
        # The time of a step grows at most in proportion to its tokens. Anything above that is an
        # interruption and is cut off.
        least, fastest = min(self._first, key=lambda step: step[1])
        for count, each in self._first:
            self._add(count, min(each, _LARGEST_SURPRISE * fastest * max(1, count / least)))
        self._first = []

    def _add(self, num_tokens: int, seconds: float) -> None:
        x, y = float(num_tokens), seconds
        self._weight = self._weight * _MEMORY + 1
        self._x = self._x * _MEMORY + x
        self._y = self._y * _MEMORY + y
        self._xx = self._xx * _MEMORY + x * x
        self._xy = self._xy * _MEMORY + x * y

    def share_of_a_token(self, num_tokens: int) -> float:
        """Return the relative cost of one more token in a step of `num_tokens` tokens.

        The unit is the time of the step divided by `num_tokens`: 0 if the time does not depend on
        the number of tokens, 1 if it is proportional to it.
        """
        if self._weight < 4:
            return _UNKNOWN_COST
        mean_x, mean_y, slope = self._line()
        if slope is None:
            return _UNKNOWN_COST
        total = mean_y + slope * (num_tokens - mean_x)
        if slope <= 0 or total <= 0:
            return _MIN_COST
        return min(max(slope * num_tokens / total, _MIN_COST), _LARGEST_COST)

    def seconds(self, num_tokens: int) -> float | None:
        """Return the expected time of a step; None before any step was measured."""
        if not self._weight:
            return None
        mean_x, mean_y, slope = self._line()
        if slope is None:
            return mean_y
        return max(mean_y + max(0.0, slope) * (num_tokens - mean_x), 0.1 * mean_y)

    def _line(self) -> tuple[float, float, float | None]:
        """Return the mean size and time, and the slope; None: the sizes hardly differ."""
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        slope = (self._xy / self._weight - mean_x * mean_y) / variance if variance >= 0.25 else None
        return mean_x, mean_y, slope


class DraftPace:
    """Decides between steps with and without drafts, by the tokens per second that each kind
    produces.

    Drafts also cost time that only a measurement shows: a draft model runs before the step, and
    kernels may take a different path. So the kind that seems slower is tried now and then. While
    drafts do not help, they are tried less and less often.
    """

    def __init__(self) -> None:
        self._plain, self._drafted = StepCost(), StepCost()
        self._num_steps = 0
        self._num_plain_steps = 0
        """Number of consecutive steps without drafts."""
        self._is_plain_due = False
        """The next step has no drafts, as the last one without them could not be measured."""
        self._wait = _FIRST_WAIT
        self._num_declined = 0
        """Steps in a row whose drafts would not have paid."""
        self._paused_rows = 0
        """Requests that ran when drafts did not pay; 0: they pay."""

    def pauses(self, num_rows: int) -> bool:
        """Return whether drafts are paused, so that this step needs no search for them.

        A pause ends early when far fewer requests run.
        """
        return self._num_plain_steps < self._wait and num_rows * 2 > self._paused_rows > 0

    def record(
        self, num_tokens: int, num_rows: int, seconds: float, *, has_replays: bool = False
    ) -> None:
        """Add the measured time of a decode step, which has drafts if it has more tokens than
        requests.

        Replayed tokens are a cost of the drafts of the step before.
        """
        if num_tokens == num_rows:
            self._is_plain_due = has_replays
            if not has_replays:
                self._plain.record(num_rows, seconds)
            self._num_plain_steps += 1
            return
        # Not measured after a long pause: a draft model then also runs all tokens that were
        # generated during the pause.
        if self._num_plain_steps <= _SHORT_PAUSE:
            self._drafted.record(num_tokens, seconds)
        self._num_plain_steps = 0

    def allows(self, num_rows: int, num_drafts: int, gain: float) -> bool:
        """Return whether the next step should have drafts.

        Args:
            num_rows: number of running requests.
            num_drafts: drafts that they would have.
            gain: expected number of accepted drafts.
        """
        if self._is_plain_due:
            self._is_plain_due = False
            return False
        self._num_steps += 1
        plain, drafted = self._plain.seconds(num_rows), self._drafted.seconds(num_rows + num_drafts)
        if plain is None:
            return drafted is None or self._num_steps % _PLAIN_AT_FIRST != 0
        if drafted is None:
            return True
        if (num_rows + gain) * plain > num_rows * drafted:
            self._wait, self._num_declined, self._paused_rows = _FIRST_WAIT, 0, 0
            return self._num_steps % _PLAIN_PERIOD != 0
        self._num_declined += 1
        if self._num_declined <= _FEW:
            return False
        self._paused_rows = num_rows
        if self._num_plain_steps < self._wait:
            return False
        # Measure again from the start: the earlier steps may have been slow for other reasons.
        self._drafted = StepCost()
        self._wait, self._num_declined = min(2 * self._wait, _LONGEST_WAIT), _FEW
        self._paused_rows = 0
        return True


class DraftControl:
    """Limits the drafts of each request, and counts the accepted ones.

    The i-th draft token of a request is accepted with the probability p ** i, where p is the
    fraction of its accepted drafts with the same evidence. Draft tokens are added while this
    probability is higher than their cost, relative to a token without drafts. And a step has drafts
    only if it then produces more tokens per second than without.

    Args:
        max_drafts: limit per request.
        adaptive: choose the number of drafts as described; False: always `max_drafts`.
        max_requests: while more requests than this run, none has drafts; 0: no limit.

    Attributes:
        num_declined_steps: steps without drafts because drafts were not worthwhile (`DraftStats`);
            the caller counts them.
    """

    def __init__(self, max_drafts: int, adaptive: bool = True, max_requests: int = 0) -> None:
        self.num_declined_steps = 0
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._accepted = [0] * max_drafts
        self._max_drafts = max_drafts
        self._adaptive = adaptive
        self._max_requests = max_requests
        self._usual_accuracy = [_initial_accuracy(n) for n in range(_MAX_EVIDENCE + 1)]
        """Share of right drafts of late, of all requests, by evidence."""
        self._cost = StepCost()
        self._pace = DraftPace()

    def limits(
        self, requests: Sequence[Request], num_running: int, most: Sequence[int] | None = None
    ) -> list[int]:
        """Return how many drafts each request may have.

        Args:
            requests: requests that could have drafts in this step.
            num_running: number of running requests.
            most: limit for each of `requests`; None: only the common limit applies.
        """
        if most is None:
            most = [self._max_drafts] * len(requests)
        if self._max_requests and num_running > self._max_requests:
            return [0] * len(requests)
        if not self._adaptive:
            return list(most)
        cost = self._cost.share_of_a_token(num_running)
        limits, expected = [], 0.0
        for request, room in zip(requests, most, strict=True):
            evidence, share = self._accuracy(request)
            limit, gain = 0, share
            while limit < room and gain > cost:
                limit, gain, expected = limit + 1, gain * share, expected + gain
            if room and not limit:
                recovered = share + _RECOVERY * (_initial_accuracy(evidence) - share)
                request.draft_accuracy[evidence] = recovered
            limits.append(limit)
        if any(limits) and not self._pace.allows(num_running, sum(limits), expected):
            return [0] * len(requests)
        return limits

    def pauses(self, num_running: int) -> bool:
        """Return whether no request may have drafts in this step. Cheaper than `limits`."""
        if self._max_requests and num_running > self._max_requests:
            return True
        return self._adaptive and self._pace.pauses(num_running)

    def record(self, requests: Sequence[Request], num_drafts: IntArray, counts: IntArray) -> None:
        """Count the accepted and rejected drafts of a step.

        Args:
            requests: [n] requests that sampled tokens.
            num_drafts: [n] drafts of each request.
            counts: [n] new tokens of each request: its accepted drafts plus one; fewer if it
                failed.
        """
        for request, drafted, count in zip(
            requests, num_drafts.tolist(), counts.tolist(), strict=True
        ):
            if not drafted:
                continue
            right = max(0, count - 1)
            self._num_drafts += 1
            self._num_draft_tokens += drafted
            for index in range(right):
                self._accepted[index] += 1
            evidence, share = self._accuracy(request)
            usual = self._usual_accuracy[evidence]
            for index in range(min(right + 1, drafted)):
                share += _LEARNING * ((index < right) - share)
                usual += _LEARNING_OF_ALL * ((index < right) - usual)
            request.draft_accuracy[evidence], self._usual_accuracy[evidence] = share, usual

    def _accuracy(self, request: Request) -> tuple[int, float]:
        """Return the evidence for the next drafts of a request (how many tokens matched), and their
        expected acceptance rate.
        """
        evidence = min(request.draft_evidence, _MAX_EVIDENCE)
        share = request.draft_accuracy.get(evidence)
        return evidence, self._usual_accuracy[evidence] if share is None else share

    def stats(self) -> DraftStats:
        """Return the counts of all drafts so far."""
        return DraftStats(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            accepted=tuple(self._accepted),
            num_declined_steps=self.num_declined_steps,
        )

    def record_time(
        self, num_tokens: int, num_rows: int, seconds: float, *, has_replays: bool = False
    ) -> None:
        """Record the time of a decode step.

        Args:
            num_tokens: tokens of the step, drafts included.
            num_rows: requests of the step.
            seconds: time that the step took.
            has_replays: the step also added the accepted drafts of the step before to recurrent
                states.
        """
        if num_tokens > num_rows or not has_replays:
            self._cost.record(num_tokens, seconds)
        self._pace.record(num_tokens, num_rows, seconds, has_replays=has_replays)


def _initial_accuracy(evidence: int) -> float:
    return evidence / (evidence + 1) if evidence else _INITIAL_ACCURACY
