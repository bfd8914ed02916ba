from gaudi_sim.vendor import bridge_config as card
from habana_frameworks import documented


@documented
def env_setting(name, value):
    return card.env_setting(name, value)


@documented
def get_pt_compile_only_mode():
    return card.get_pt_compile_only_mode()
