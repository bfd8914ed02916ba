"""Padded shapes of forward passes, and the division of device memory. Pure logic.

    settings, linear,      generate the buckets: the twelve variables, three strategies,
    exponential, sparse,   a file; `generate` combines them
    bucket_file, generate
    catalog                the finite set of buckets, and the cheapest one for a batch
    step_limits, closure   the possible batches of a step, and the proof that each has a bucket
    bucket_plan            all of it for the config of an engine
    traffic                counts of the shapes that were needed, in a table and a file
    optimal                the best buckets for a traffic, with a bound on how good they are
    shrink                 a smaller catalog if some buckets do not fit in memory
    ledger, capture_plan   bytes per class, and which graphs are captured within them
    log_lines              the log lines about buckets and memory

Independent of torch, devices, environment variables and requests.
"""

from vllm.bucketing.bucket import Bucket, Phase
from vllm.bucketing.ledger import MemoryClass, MemoryLedger, format_bytes
from vllm.bucketing.settings import BucketRange, BucketSettings
from vllm.bucketing.step_limits import StepLimits

__all__ = [
    "Bucket",
    "BucketRange",
    "BucketSettings",
    "MemoryClass",
    "MemoryLedger",
    "Phase",
    "StepLimits",
    "format_bytes",
]
