from habana_frameworks import documented
from vllm.platforms.habana.sim_vendor import core as card


@documented
def mark_step(device_str="", sync=False):
    return card.mark_step(device_str, sync)
