"""Chooses buckets for a traffic, with a proof of how far from the best they can be.

Shapes p with weights w are given; a bucket covers the shapes that are not larger in any dimension,
and a shape pays the cost of the cheapest bucket that covers it. A number of buckets, or as many as
a budget of seconds or bytes allows, is chosen so that the cost is least: a p-median problem.

    chain        one dimension: a dynamic programme is exact
    bound        several: a lower bound
    exchanges    several: each set that the bound visits, and one found greedily, is improved; the
                 cheapest is taken
    intervals    many shapes: neighbouring sizes are merged

It needs numpy only. It knows no engine: costs and prices are functions of the caller.
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
