"""Test copying inputs to the card: no copy is waited for, and no buffer is overwritten while its
copy runs.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from tests.hpu import simulated_hpu
from vllm.worker.hpu.launches.host_buffers import HostBuffers


@dataclass
class Copy:
    """A copy that runs until the test ends it. `record_event` returns it as well."""

    buffer: torch.Tensor
    has_ended: bool = False

    def query(self) -> bool:
        return self.has_ended


@dataclass
class SlowCard:
    """A card whose copies end when the test says so. It reads the memory of the host as late as
    possible.
    """

    device = torch.device("meta")
    buffers: list[torch.Tensor] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)

    def pinned(self, num_elements: int) -> torch.Tensor:
        self.buffers.append(torch.full((num_elements,), -1, dtype=torch.int32))
        return self.buffers[-1]

    def record_event(self) -> Copy:
        written = [b for b in self.buffers if all(b is not c.buffer for c in self.in_flight())]
        # The newest copy comes from the only buffer that is not being read and that has the new
        # number.
        newest = next(b for b in written if b[0] == len(self.copies))
        self.copies.append(Copy(newest))
        return self.copies[-1]

    def in_flight(self) -> list[Copy]:
        return [copy for copy in self.copies if not copy.has_ended]


def test_no_buffer_is_written_while_a_copy_from_it_is_in_flight():
    card = SlowCard()
    buffers = HostBuffers(card)

    def send(size: int) -> None:
        buffers.to_device(np.full(size, len(card.copies), np.int32))

    for size in (10, 700, 3000):
        send(size)
    assert len(card.buffers) == 3
    assert [int(copy.buffer[0]) for copy in card.copies] == [0, 1, 2]
    card.copies[1].has_ended = True
    send(1000)
    send(5)
    assert [int(copy.buffer[0]) for copy in card.in_flight()] == [0, 2, 3, 4]
    assert len(card.buffers) == 4
    for copy in card.copies:
        copy.has_ended = True
    for size in (5, 1024, 4000):
        send(size)
        card.copies[-1].has_ended = True
    assert len(card.buffers) == 4


def test_a_card_gets_the_numbers_and_the_host_does_not_wait():
    with simulated_hpu() as bridge, bridge.warmed_section():
        buffers = HostBuffers(bridge)
        sent = [np.arange(n, dtype=np.int32) for n in (5, 2000, 7)]
        got = [buffers.to_device(packed) for packed in sent]
        counters = bridge.counters()
        assert (counters.blocking_h2d, counters.host_syncs) == (0, 0)
        assert counters.h2d_bytes == sum(x.nbytes for x in sent)
    for tensor, packed in zip(got, sent, strict=True):
        assert tensor.device.type == "hpu" and tensor.tolist() == packed.tolist()
    torch.zeros(3).to("hpu")
    assert bridge.counters().blocking_h2d == 1


def test_arrays_of_any_shape_and_type_are_copied_without_waiting():
    sent = [
        np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
        np.arange(4, dtype=np.int64) << 40,
        np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
    ]
    with simulated_hpu() as bridge:
        to_device = HostBuffers(bridge).to_device
        got = [to_device(array) for array in sent]
        assert bridge.counters().blocking_h2d == 0
    for tensor, array in zip(got, sent, strict=True):
        assert tensor.device.type == "hpu" and tensor.tolist() == array.tolist()
