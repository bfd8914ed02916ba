"""Implement `vllm bench`: measure a server under load, or the engine without a server.

`load` sends requests, `http_client` and `backends` talk to the server, `datasets` and `arrivals`
define what is sent and when, `statistics` and `report` describe the results. One module per
subcommand combines them.
"""
