from habana_frameworks import documented
from vllm.platforms.habana.sim_vendor import internal as card


@documented
def is_lazy():
    return card.is_lazy()
