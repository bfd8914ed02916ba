from gaudi_sim.vendor import normalization as card
from habana_frameworks import documented


class FusedRMSNorm:
    @staticmethod
    @documented
    def apply(data_in, gamma, eps, use_stages=True, bwd_mode=0, fast_math=False, /):
        return card.FusedRMSNorm.apply(data_in, gamma, eps, use_stages, bwd_mode, fast_math)
