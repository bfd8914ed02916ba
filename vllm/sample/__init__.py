"""From logits to tokens.

    state       what each row of the batch asked for, and what it has generated   (host)
    metadata    the part of it that one launch needs                              (host -> device)
    sampler     logits and metadata to token ids                                  (device)

The rest are the parts of the sampler, one file each: `constraints`, `penalties` and `processors`
change logits; `filters` cuts off the tail; `blocks` reduces over the vocabulary; `random` has the
random numbers; `logprobs` the log-probabilities.
"""
