from habana_frameworks import documented
from vllm.platforms.habana.sim_vendor import normalization as card


class FusedRMSNorm:
    @staticmethod
    @documented
    def apply(data_in, gamma, eps, use_stages=True, bwd_mode=0, fast_math=False, /):
        return card.FusedRMSNorm.apply(data_in, gamma, eps, use_stages, bwd_mode, fast_math)
