"""Chooses buckets for a traffic, with a bound on how far they are from the best ones.

Given are shapes p with weights w. A bucket covers the shapes that are not larger in any dimension,
and a shape costs as much as the cheapest bucket that covers it. A number of buckets, or as many as
a budget of seconds or bytes allows, is chosen to minimize the cost: a p-median problem.

    chain        one dimension: dynamic programming is exact
    bound        several: a lower bound
    exchanges    several: improves each set that the bound visits, and a greedy one; the
                 cheapest is used
    intervals    many shapes: neighbouring sizes are merged

It needs only numpy. It knows no engine: costs and prices are functions of the caller.
"""

from vllm.bucketing.optimal.certificate import Budget, ChosenBuckets, Floats, Ints, ShapeCost
from vllm.bucketing.optimal.choose import choose_buckets
from vllm.bucketing.optimal.shapes import cost_of

__all__ = [
    "Budget",
    "ChosenBuckets",
    "Floats",
    "Ints",
    "ShapeCost",
    "choose_buckets",
    "cost_of",
]
