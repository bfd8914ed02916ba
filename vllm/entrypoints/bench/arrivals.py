"""When requests are sent, in seconds after the start."""

import math
import random


def arrival_times(
    count: int, request_rate: float, burstiness: float, rng: random.Random
) -> list[float]:
    """Times in ascending order; the first one is 0.

    Gaps have a gamma distribution with mean 1 / `request_rate` and coefficient of variation
    1 / sqrt(`burstiness`): 1 is a Poisson process, less comes in bursts, more is more even.

    Args:
        count: requests.
        request_rate: per second; infinity sends all at once.
        burstiness: above 0; infinity makes all gaps alike.
    """
    if math.isinf(request_rate):
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        if math.isinf(burstiness):
            now += 1 / request_rate
        else:
            now += rng.gammavariate(burstiness, 1 / (request_rate * burstiness))
    return times
