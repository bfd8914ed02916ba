from gaudi_sim.vendor import core as card
from habana_frameworks import documented


@documented
def mark_step(device_str="", sync=False):
    return card.mark_step(device_str, sync)
