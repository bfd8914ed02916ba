"""Define the settings of the server, without the engine's: flags of `vllm serve`.

One field is one flag, as for the engine (`vllm.config.fields`); docs/server_arguments.md is
generated from the fields. Imports no framework.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm.config.fields import check_at_least, check_one_of
from vllm.errors import ConfigError

LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """Settings of the HTTP server."""

    host: str | None = None
    """Address to listen on. Default: all addresses of this machine."""

    port: int = 8000
    """Port to listen on. 0: choose a free port and log it."""

    headless: bool = False
    """Only run replicas for a server on another machine (see --data-parallel-address), without an
    HTTP server for clients."""

    uds: str | None = None
    """Path of a Unix domain socket to listen on, instead of host and port."""

    api_key: tuple[str, ...] = field(default=(), repr=False)
    """API keys. A client must send one of them, as `Authorization: Bearer KEY` or `x-api-key: KEY`.
    Routes without a key: health checks, and the pages /, /status and /docs, which contain no data
    and ask for a key themselves. Default: VLLM_API_KEY; without both, everyone is served."""

    root_path: str = ""
    """Path prefix of this server behind a proxy, such as /v2/llm. Default: none."""

    ssl_keyfile: str | None = None
    """File with the private key of the server's certificate (PEM)."""

    ssl_certfile: str | None = None
    """File with the certificate of the server (PEM). It turns TLS (https) on."""

    ssl_ca_certs: str | None = None
    """File with the CA certificates that client certificates must be signed by (PEM)."""

    ssl_cert_reqs: int = 0
    """Whether clients must send a certificate: 0 no, 1 optional, 2 required."""

    enable_ssl_refresh: bool = False
    """Load certificate and key again when their files change."""

    allowed_origins: tuple[str, ...] = ("*",)
    """Origins (scheme and host of web pages) from which browsers may call this server (CORS)."""

    allowed_methods: tuple[str, ...] = ("*",)
    """HTTP methods that web pages of other origins may use (CORS)."""

    allowed_headers: tuple[str, ...] = ("*",)
    """HTTP headers that web pages of other origins may send (CORS)."""

    allow_credentials: bool = False
    """Let web pages of other origins send cookies and other credentials (CORS). Needs
    allowed_origins with names, not *."""

    allow_private_network: bool = False
    """Let web pages from the internet call this server in a private network or on the user's own
    machine (Private Network Access of browsers)."""

    middleware: tuple[str, ...] = ()
    """Additional ASGI middleware, as `module.name` of a class or of a coroutine function."""

    early_requests: Literal["wait", "reject"] = "wait"
    """What happens to requests that arrive before the model is ready. wait: they wait. reject: they
    get status 503 with Retry-After."""

    max_queued_requests: int | None = None
    """Maximum number of waiting requests. If there are more, new requests get status 503. Default:
    no limit."""

    max_queued_tokens: int | None = None
    """Maximum number of prompt tokens of all waiting requests together. If there are more, new
    requests get status 503. Default: no limit."""

    request_timeout: float | None = None
    """Seconds after which a request is aborted with status 504. Default: no limit."""

    max_request_bytes: int = 16 * 2**20
    """Maximum size of a request body in bytes. Larger requests get status 413."""

    max_media_request_bytes: int = 96 * 2**20
    """Maximum size in bytes of a request body that can contain images, sounds or videos, if the
    model reads any. The default is enough for 16 files of 4 MB as base64."""

    keep_alive_timeout: int = 120
    """Seconds that an idle connection stays open. Use more than the time of your proxy (usually 60
    to 90 seconds), because it answers 502 if the server closes first. Default:
    VLLM_HTTP_TIMEOUT_KEEP_ALIVE."""

    body_timeout: float = 60.0
    """Maximum number of seconds until the whole body of a request has arrived. After that the
    request gets status 408."""

    max_n: int = 128
    """Maximum number of outputs that a request may ask for (n, best_of)."""

    max_stop_strings: int = 64
    """Maximum number of stop strings in a request."""

    max_logits_processors: int = 16
    """Maximum number of logits processors in a request."""

    max_batch_prompts: int = 2048
    """Maximum number of prompts, inputs or documents in one request."""

    max_batch_sequences: int = 2048
    """Maximum number of outputs of one request in total: number of prompts times n (or best_of)."""

    max_messages: int = 8192
    """Maximum number of messages in a conversation, or of items in an input of the Responses
    API."""

    max_tools: int = 1024
    """Maximum number of tools in a request."""

    max_stop_token_ids: int = 1024
    """Maximum number of entries in stop_token_ids."""

    max_bad_words: int = 4096
    """Maximum number of entries in bad_words."""

    max_word_chars: int = 256
    """Maximum number of characters in one stop string or bad word."""

    max_logit_bias: int = 4096
    """Maximum number of entries in logit_bias."""

    max_allowed_token_ids: int = 2**18
    """Maximum number of entries in allowed_token_ids."""

    max_detokenize_tokens: int = 2**17
    """Maximum number of tokens in a request to /detokenize."""

    max_choices: int = 4096
    """Maximum number of entries in guided_choice."""

    max_request_values: int = 2**20
    """Maximum number of JSON values (numbers, strings, lists, objects) in one request body."""

    max_request_names: int = 2**17
    """Maximum number of name-value pairs in all JSON objects of one request body."""

    max_prompt_logprob_values: int = 2**22
    """Maximum number of log-probabilities of prompt tokens in one answer: tokens of all prompts
    times
    (prompt_logprobs + 1) times n."""

    shutdown_timeout: float = 30.0
    """Seconds to wait for running requests to finish after SIGTERM or Ctrl-C; a second signal stops
    the server at once."""

    restart_engine: int = 0
    """Maximum number of restarts of a crashed engine process. After that, the server exits."""

    chat_template: str | None = None
    """Chat template (Jinja): a file, or the template itself. Default: the template of the model."""

    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    """Form in which the chat template expects the content of messages. string: one string. openai:
    a list of parts. auto: detected from the template."""

    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Default arguments of the chat template, such as `{"enable_thinking": false}`. A request can
    override them."""

    response_role: str = "assistant"
    """Role in the answers to chat requests."""

    enable_auto_tool_choice: bool = False
    """Let the model decide when to call a tool (tool_choice auto). Needs tool_call_parser."""

    tool_call_parser: str | None = None
    """Name of the parser for the tool calls of the model; `--tool-call-parser help` lists the
    names."""

    tool_parser_plugin: str | None = None
    """Python file that registers additional tool parsers or reasoning parsers. Parsers that were
    written for vLLM also work."""

    reasoning_parser: str | None = None
    """Name of the parser that separates the reasoning of the model from its answer;
    `--reasoning-parser help` lists the names."""

    reasoning_parser_plugin: str | None = None
    """Python file that registers additional reasoning parsers. Parsers that were written for vLLM
    also work."""

    enable_reasoning: bool = False
    """Old flag, not needed any more: --reasoning-parser is enough. The flag only checks that
    --reasoning-parser is given."""

    lora_modules: tuple[str, ...] = ()
    """LoRA adapters that requests may name as `model`: name=path, or JSON with name and path.
    Needs --enable-lora."""

    prompt_adapters: tuple[str, ...] = ()
    """Prompt adapters. Not supported: the server does not start with this flag."""

    return_tokens_as_token_ids: bool = False
    """Write tokens in log-probabilities as `token_id:123`, not as text."""

    enable_prompt_tokens_details: bool = False
    """Report in `usage` how many prompt tokens were cached."""

    enable_force_include_usage: bool = False
    """Send `usage` at the end of every stream, even if the request does not ask for it."""

    enable_request_id_headers: bool = False
    """Add the header X-Request-Id to every response."""

    disable_fastapi_docs: bool = False
    """Do not serve /docs and /openapi.json."""

    disable_web_ui: bool = False
    """Do not serve the chat page; / shows the status page."""

    status_page: bool = True
    """Show a status page at /status."""

    log_requests: bool = field(default=False, metadata={"aliases": ("--enable-log-requests",)})
    """Log the body of each request, prompts included."""

    max_log_len: int | None = None
    """Maximum number of characters of a string, and of entries of a list, in the lines of
    --log-requests. Default: all."""

    log_format: Literal["text", "json"] | None = None
    """Format of the log lines of the server. Default: the value of VLLM_LOGGING_FORMAT, which is
    also the format of the engine."""

    log_config_file: str | None = None
    """JSON file with logging settings for Python's `logging.config.dictConfig`."""

    uvicorn_log_level: LogLevel = "info"
    """Level of the HTTP server's own log."""

    disable_uvicorn_access_log: bool = False
    """Do not log a line for each HTTP request."""

    otlp_traces_endpoint: str | None = None
    """URL to which OpenTelemetry traces are sent. Needs `pip install 'vllm[otel]'`. Default: no
    traces."""

    dev_mode: bool = field(default=False, metadata={"cli": False})
    """Also serve the routes for development (VLLM_SERVER_DEV_MODE)."""

    can_update_adapters: bool = field(default=False, metadata={"cli": False})
    """Serve the routes that add and remove LoRA adapters (VLLM_ALLOW_RUNTIME_LORA_UPDATING)."""

    adapters_folder: str | None = field(default=None, metadata={"cli": False})
    """Folder of LoRA adapters that requests may name (VLLM_LORA_RESOLVER_CACHE_DIR)."""

    can_profile: bool = field(default=False, metadata={"cli": False})
    """Serve the routes that start and stop a trace (VLLM_TORCH_PROFILER_DIR is set)."""

    def __post_init__(self) -> None:
        check_one_of(self, "early_requests", ("wait", "reject"))
        check_one_of(self, "chat_template_content_format", ("auto", "string", "openai"))
        if self.log_format is not None:
            check_one_of(self, "log_format", ("text", "json"))
        check_at_least(
            self, 1, "max_request_bytes", "max_media_request_bytes", "max_n", "max_batch_prompts"
        )
        check_at_least(self, 1, "max_batch_sequences", "max_messages", "max_request_values")
        check_at_least(self, 1, "max_request_names", "max_prompt_logprob_values")
        check_at_least(self, 0, "restart_engine", "max_stop_strings", "max_stop_token_ids")
        check_at_least(self, 0, "max_bad_words", "max_word_chars", "max_logit_bias", "max_tools")
        check_at_least(self, 0, "max_allowed_token_ids", "max_choices", "max_detokenize_tokens")
        check_at_least(self, 0, "max_logits_processors")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be 0 to 65535, got {self.port}")
        if self.enable_auto_tool_choice and not self.tool_call_parser:
            raise ConfigError(
                "enable_auto_tool_choice needs tool_call_parser: add "
                "--tool-call-parser NAME (`--tool-call-parser help` lists the names), or leave "
                "--enable-auto-tool-choice out"
            )
        if self.enable_reasoning and not self.reasoning_parser:
            raise ConfigError(
                "enable_reasoning needs reasoning_parser, which says how the model writes its "
                "reasoning: add --reasoning-parser NAME (`--reasoning-parser help` lists the "
                "names), or leave --enable-reasoning out"
            )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                "allow_credentials cannot be used with allowed_origins *: name the "
                "origins in allowed_origins"
            )
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError(
                "ssl_keyfile needs ssl_certfile, the certificate of this key: give both, or neither"
            )
        if self.ssl_ca_certs and not self.ssl_certfile:
            raise ConfigError(
                "ssl_ca_certs needs ssl_certfile, because only a server with TLS "
                "checks clients: add --ssl-certfile, or leave --ssl-ca-certs out"
            )
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"ssl_cert_reqs must be 0, 1 or 2, got {self.ssl_cert_reqs}")
        if self.shutdown_timeout < 0:
            raise ConfigError(f"shutdown_timeout must be at least 0, got {self.shutdown_timeout}")
        check_at_least(self, 1, "keep_alive_timeout")
        if self.body_timeout <= 0:
            raise ConfigError(f"body_timeout must be above 0, got {self.body_timeout}")
        if self.request_timeout is not None and self.request_timeout <= 0:
            raise ConfigError(f"request_timeout must be above 0, got {self.request_timeout}")
        for name in ("max_queued_requests", "max_queued_tokens", "max_log_len"):
            if getattr(self, name) is not None:
                check_at_least(self, 0, name)
        if any(not key for key in self.api_key):
            raise ConfigError("api_key must not be empty")
        if any(key != key.strip() or not key.isprintable() for key in self.api_key):
            raise ConfigError(
                "api_key must not have line breaks, other control characters, or spaces around "
                "it: no client can send them in a header. Give only the key."
            )
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path must begin with /, got {self.root_path!r}")
        if self.prompt_adapters:
            raise ConfigError(
                "prompt_adapters is not supported. Put instructions into a system prompt"
            )


def from_settings(settings: Mapping[str, Any]) -> ServerArgs:
    """Create the server's arguments from parsed settings. Lists become tuples; None means "not
    given".
    """
    from vllm.config.fields import config_fields

    fields = config_fields(ServerArgs)
    given: dict[str, Any] = {f.name: f.convert(settings.get(f.name)) for f in fields}
    return ServerArgs(**given)
