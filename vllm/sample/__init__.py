"""From logits to tokens.

    state       what each row of the batch asked for, and what it has generated   (host)
    metadata    the part of it that one launch needs                              (host -> device)
    sampler     logits and metadata to token ids                                  (device)
    cpu_sampler the same on C++ kernels, and who gets it                          (host)

On a device that compiles shapes, `static_shapes` says what launches there are, and `warmup` makes
one of each.

The rest are the parts of the sampler, one file each: `constraints`, `penalties` and `processors`
change logits; `filters` cuts off the tail; `blocks` reduces over the vocabulary; `random` has the
random numbers; `logprobs` the log-probabilities; `features` the names of what a row can ask for.
"""
