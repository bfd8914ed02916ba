"""`vllm bench`: load for a server, and the speed of the engine without one.

`load` sends, `http_client` and `backends` speak to the server, `datasets` and `arrivals` say what
is sent and when, `statistics` and `report` say how it went; one module per subcommand joins them.
"""
