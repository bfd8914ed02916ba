"""Follow which blocks the prefix cache of a server holds. The server needs

    vllm serve --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq",
        "topic": "kv-events", "replay_endpoint": "tcp://*:5558"}'

Sends a request itself, so that there is something to see, and asks for what it has missed: a
subscriber that has just connected may not get the first messages.
"""

import argparse
import urllib.parse

import msgspec
import zmq
from openai import OpenAI

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

decode = msgspec.msgpack.Decoder(KVEventBatch).decode


class Blocks:
    """The cached blocks of the server: hash of a block -> its tokens."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def follow(self, batch: KVEventBatch) -> None:
        """Apply the events of one batch."""
        for event in batch.events:
            if isinstance(event, BlockStored):
                size = event.block_size
                for index, block_hash in enumerate(event.block_hashes):
                    tokens = event.token_ids[index * size : (index + 1) * size]
                    self.tokens[block_hash] = tokens
                    print(f"  stored {block_hash:016x}: {tokens[:4]}...")
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self.tokens.pop(block_hash, None)
                    print(f"  removed {block_hash:016x}")
            elif isinstance(event, AllBlocksCleared):
                self.tokens.clear()
                print("  cleared")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--port", type=int, default=5557, help="of the events")
    parser.add_argument("--replay-port", type=int, default=5558)
    parser.add_argument("--topic", default="kv-events")
    args = parser.parse_args()
    host = urllib.parse.urlsplit(args.url).hostname
    context = zmq.Context()
    events = context.socket(zmq.SUB)
    events.subscribe(args.topic.encode())
    events.connect(f"tcp://{host}:{args.port}")
    replay = context.socket(zmq.DEALER)
    replay.connect(f"tcp://{host}:{args.replay_port}")

    client = OpenAI(base_url=args.url, api_key=args.api_key)
    model = client.models.list().data[0].id
    prompt = "import os\n" * 20
    client.completions.create(model=model, prompt=prompt, max_tokens=24)

    blocks, next_number = Blocks(), 0
    replay.send_multipart([b"", next_number.to_bytes(8, "big")])
    while True:
        _, number, data = replay.recv_multipart()
        if not data:
            break
        blocks.follow(decode(data))
        next_number = int.from_bytes(number, "big") + 1
    print(f"{len(blocks.tokens)} blocks after {next_number} batches that were sent again")

    last_number = -1
    while events.poll(1000):  # a program that stays would wait without an end
        _, frame, data = events.recv_multipart()
        number = int.from_bytes(frame, "big")
        if number <= last_number:
            print("the engine was started again: its numbers begin at 0, and its cache is empty")
            blocks, next_number = Blocks(), 0
        last_number = number
        if number > next_number:
            print(f"missed {number - next_number} batches: ask again, as above")
        if number >= next_number:
            blocks.follow(decode(data))
            next_number = number + 1
    print(f"{len(blocks.tokens)} blocks are known")
    context.destroy(linger=0)


if __name__ == "__main__":
    main()
