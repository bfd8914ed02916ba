from gaudi_sim.vendor import hpu as card
from habana_frameworks import documented


@documented
def synchronize():
    return card.synchronize()


@documented
def mem_get_info(device=None):
    return card.mem_get_info(device)


@documented
def max_memory_allocated(device=None):
    return card.max_memory_allocated(device)


@documented
def reset_peak_memory_stats(device=None):
    return card.reset_peak_memory_stats(device)


@documented
def get_device_name(device=None):
    return card.get_device_name(device)


@documented
def wrap_in_hpu_graph(
    module, asynchronous=False, disable_tensor_cache=False, dry_run=False, max_graphs=None
):
    return card.wrap_in_hpu_graph(module, asynchronous, disable_tensor_cache, dry_run, max_graphs)


class Event:
    def __init__(self, enable_timing=False):
        self._event = card.Event(enable_timing)

    @documented
    def record(self, stream=None):
        self._event.record(stream)

    @documented
    def query(self):
        return self._event.query()
