from gaudi_sim.vendor import metrics as card
from habana_frameworks import documented


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
