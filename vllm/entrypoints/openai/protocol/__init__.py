"""Bodies of requests and responses, as pydantic models: one module per family of routes.

Requests are checked here; everything a request can be refused for without looking at the model
is refused by these classes. Responses of the hot path are built as plain dicts elsewhere, and
these classes only describe them.
"""
