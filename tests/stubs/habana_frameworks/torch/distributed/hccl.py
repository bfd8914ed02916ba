import os

from gaudi_sim.vendor import hccl as card  # noqa: F401  (registers the backend)
from habana_frameworks import documented


@documented
def initialize_distributed_hpu(world_size=None, rank=None, local_rank=None):
    world_size = world_size or int(os.environ.get("WORLD_SIZE", 1))
    rank = rank or int(os.environ.get("RANK", 0))
    local_rank = local_rank or int(os.environ.get("LOCAL_RANK", 0))
    modules = os.environ.get("HABANA_VISIBLE_MODULES", "0,1,2,3,4,5,6,7").split(",")
    os.environ["HLS_MODULE_ID"] = modules[local_rank]
    return world_size, rank, local_rank


initialize_distributed_hpu()
