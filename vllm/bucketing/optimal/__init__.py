"""Chooses buckets for a traffic, and bounds how much more they cost than the best buckets.

The input is a list of shapes p with weights w. A bucket covers the shapes that are not larger than
the bucket in any dimension, and a shape costs as much as the cheapest bucket that covers it. The
buckets are chosen to minimize the total cost; their number is given, or limited by a budget of
seconds or bytes. This is a p-median problem.

    chain        for shapes with one dimension: finds the best buckets by dynamic programming
    bound        for several dimensions: computes a lower bound of the cost
    exchanges    for several dimensions: improves each set of buckets that the bound visits, and a
                 greedy set; the cheapest one is used
    intervals    for many shapes: merges neighbouring sizes

The package needs only numpy and knows no engine: the caller passes costs and prices as functions.
"""

from vllm.bucketing.optimal.certificate import Budget, ChosenBuckets, Floats, Ints, ShapeCost
from vllm.bucketing.optimal.choose import choose_buckets
from vllm.bucketing.optimal.shapes import cost_of

__all__ = ["Budget", "ChosenBuckets", "Floats", "Ints", "ShapeCost", "choose_buckets", "cost_of"]
