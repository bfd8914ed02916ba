from habana_frameworks import documented

LAZY = True


@documented
def is_lazy():
    return LAZY
