from gaudi_sim.vendor import random as card
from habana_frameworks import documented


@documented
def manual_seed_all(seed):
    return card.manual_seed_all(seed)
