"""Enforce structured output: JSON, a regular expression, a choice, or a grammar.

In the process that takes requests:

    spec         what the request asks for, as text and options; size limits
    json_schema  which library enforces all of a JSON schema
    regex        a Python pattern in the dialect of the libraries, with Python's meaning
    compiler     spec -> Grammar: cache, deadline, at most two processes that compile
    compile_worker                          what runs in those processes

In the engine core:

    matchers     Grammar and tokens so far -> mask of the tokens that may come
    row_matcher  the same, plus end tokens, min_tokens and allowed_token_ids of one request

Both:

    backends     xgrammar and llguidance, which nothing else imports; the bytes of every token
"""
