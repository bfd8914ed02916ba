from gaudi_sim.vendor import internal as card
from habana_frameworks import documented


@documented
def is_lazy():
    return card.is_lazy()
