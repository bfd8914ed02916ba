"""Configure the logs of the server process from its flags."""

import json
import logging
import logging.config
from pathlib import Path

from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.errors import ConfigError
from vllm.logger import share_handlers, use_format


def configure_logs(args: ServerArgs) -> None:
    """Set up the logs of this process. uvicorn logs to the same handlers as this package.

    Raises:
        ConfigError: the file that `log_config_file` names cannot be used.
    """
    if args.log_format is not None:
        use_format(args.log_format)
    share_handlers("uvicorn")
    logging.getLogger("uvicorn").setLevel(args.uvicorn_log_level.upper().replace("TRACE", "DEBUG"))
    if args.log_config_file is None:
        return
    try:
        config = json.loads(Path(args.log_config_file).expanduser().read_text(encoding="utf-8-sig"))
        logging.config.dictConfig(config)
    # A wrong setting may raise any of these errors, depending on its handler or formatter.
    except (OSError, ValueError, TypeError, AttributeError, LookupError, ImportError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"log_config_file={args.log_config_file!r}: {reason}") from error
