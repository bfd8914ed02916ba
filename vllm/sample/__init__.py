"""Sample tokens from logits.

    state       what each request asked for, and what it has generated            (host)
    metadata    the part of it that one batch needs                              (host -> device)
    sampler     logits and metadata to token ids                                  (device)
    cpu_sampler the same with C++ kernels                                         (host)

On a device that compiles shapes, `static_shapes` lists the possible batch shapes, and `warmup`
creates one batch of each.

The other files are parts of the sampler: `constraints`, `masks`, `penalties` and `processors`
change logits; `filters` applies min_p, top_k and top_p; `blocks` reduces over the vocabulary;
`random` has the random numbers, `logprobs` the log-probabilities, and `features` the bits and
parameters of a request.
"""
