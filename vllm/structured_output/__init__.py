"""Output that has a form: JSON, a regular expression, a choice, a grammar.

In the process that takes requests:

    spec         what was asked, as one line of text and options; limits before any work
    json_schema  what a schema demands, and which library enforces all of it
    regex        a Python pattern in the dialect of the libraries, with Python's meaning
    compiler     spec -> Grammar: cache, deadline, at most two processes that compile
    compile_worker                          what runs in those processes

In the engine core:

    matchers     Grammar and tokens so far -> mask of the tokens that may come
    row_matcher  the same with end tokens, min_tokens and allowed_token_ids of one request

Both:

    vocabulary   the bytes of every token
    backends     xgrammar and llguidance; nothing else imports them
"""
