"""Tokenise texts of megabytes in a process that can be killed.

A tokenizer cannot be stopped in the middle of a text, and needs a gigabyte for 10 MB. The process
is killed when the client disconnects, and releases all its memory when it ends.
"""

import asyncio
import functools
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from vllm.errors import RequestError
from vllm.utils.process.deadline_worker import (
    DeadlineExceeded,
    DeadlineWorker,
    WorkerDied,
    make_server,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEADLINE_S = 600.0
_MAX_MEMORY_BYTES = 8 * 2**30
_HAS_SPECIAL_TOKENS = struct.Struct("<?")


class LongPromptTokenizer:
    """Tokenises one text at a time, in a separate process."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="huge-texts")

    async def encode(
        self, tokenizer: "PreTrainedTokenizerBase", text: str, *, add_special_tokens: bool
    ) -> list[int]:
        """Return the token ids of a text. If this is cancelled, the process is killed.

        Args:
            tokenizer: a fast tokenizer (of the library tokenizers).
            text: valid Unicode.
            add_special_tokens: passed to the tokenizer.

        Raises:
            RequestError: it takes too long, or too much memory.
        """
        argument = _HAS_SPECIAL_TOKENS.pack(add_special_tokens) + text.encode()
        num_bytes = len(argument) - _HAS_SPECIAL_TOKENS.size
        async with self._turn:
            run = functools.partial(asyncio.get_running_loop().run_in_executor, self._thread)
            setup = await run(lambda: tokenizer.backend_tokenizer.to_str().encode())
            server = make_server("vllm.engine.input.long_prompt_tokenizer:start", setup)
            worker = DeadlineWorker(server, max_memory_bytes=_MAX_MEMORY_BYTES)
            try:
                await run(worker.start)
                return await run(lambda: _as_list(worker.call(argument, DEADLINE_S)))
            except DeadlineExceeded:
                raise RequestError(
                    f"the prompt ({num_bytes} bytes of text) could not be split into tokens "
                    f"within {DEADLINE_S:g} s. Send a shorter text.",
                    param="prompt",
                ) from None
            except WorkerDied:
                raise RequestError(
                    f"there is not enough memory to split the prompt ({num_bytes} bytes of text) "
                    "into tokens. Send a shorter text.",
                    param="prompt",
                ) from None
            finally:
                if worker.pid is None:
                    server.close()  # ends the process even while it is importing
                worker.close()
                server.close()

    def shutdown(self) -> None:
        """Accept no more texts."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _as_list(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()


# ---- the process ------------------------------------------------------------------------------


def start(setup: bytes) -> Callable[[bytes], bytes]:
    """Create the handler of the worker process.

    `setup` is the JSON of a tokenizer. The input of the handler is a byte, whether to add special
    tokens, followed by UTF-8 text. Its output is token ids as int32.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(setup.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(argument: bytes) -> bytes:
        (add_special_tokens,) = _HAS_SPECIAL_TOKENS.unpack_from(argument)
        text = argument[_HAS_SPECIAL_TOKENS.size :].decode()
        encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return np.array(encoding.ids, np.int32).tobytes()

    return encode
