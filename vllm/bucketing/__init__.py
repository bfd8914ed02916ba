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
from vllm.bucketing.catalog.bucket_plan import BucketPlan, plan_buckets
from vllm.bucketing.catalog.catalog import Catalog
from vllm.bucketing.catalog.closure import ClosureReport, missing_buckets, prove
from vllm.bucketing.ledger import MemoryClass, MemoryLedger, format_bytes
from vllm.bucketing.settings import BucketRange, BucketSettings
from vllm.bucketing.step_limits import StepLimits
from vllm.bucketing.strategies.generate import GeneratedBuckets, Strategy, generate_buckets

__all__ = [
    "Bucket",
    "BucketPlan",
    "BucketRange",
    "BucketSettings",
    "Catalog",
    "ClosureReport",
    "GeneratedBuckets",
    "MemoryClass",
    "MemoryLedger",
    "Phase",
    "StepLimits",
    "Strategy",
    "format_bytes",
    "generate_buckets",
    "missing_buckets",
    "plan_buckets",
    "prove",
]
