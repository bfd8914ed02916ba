from habana_frameworks import documented
from vllm.platforms.habana.sim_vendor import random as card


@documented
def manual_seed_all(seed):
    return card.manual_seed_all(seed)
