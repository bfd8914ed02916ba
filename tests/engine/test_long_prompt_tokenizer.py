"""Test tokenising texts of megabytes whose client leaves."""

import asyncio

import pytest

from tests.engine.tokenizers_for_tests import byte_level
from vllm.engine.input import long_prompt_tokenizer
from vllm.engine.input.long_prompt_tokenizer import LongPromptTokenizer
from vllm.utils.process.deadline_worker import make_server


def test_nobody_waits_for_the_start_of_a_process_that_is_no_longer_needed(monkeypatch, tmp_path):
    begun, servers = tmp_path / "begun", []

    def make_endless(target: str, setup: bytes):
        servers.append(make_server("tests.utils.workers:endless", str(begun).encode()))
        return servers[-1]

    monkeypatch.setattr(long_prompt_tokenizer, "make_server", make_endless)

    async def main() -> None:
        texts = LongPromptTokenizer()
        work = asyncio.ensure_future(texts.encode(byte_level(), "a", add_special_tokens=True))
        while not begun.exists():
            await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work  # This would take as long as a start may take, and block the event loop.
        texts.shutdown()
        assert not servers[0].is_running

    asyncio.run(main())
