from habana_frameworks import documented
from vllm.platforms.habana.sim_vendor import metrics as card


class Metric:
    def __init__(self, metric):
        self._metric = metric

    @documented
    def stats(self):
        return self._metric.stats()


@documented
def metric_global(name):
    metric = card.metric_global(name)
    return None if metric is None else Metric(metric)
