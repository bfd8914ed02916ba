"""Seconds and bytes of what a start makes for each shape: recipes, and HPU graphs of them."""

from vllm.cost_model import constants


def compile_seconds(num_ops: int) -> float:
    """Return the seconds that compiling one recipe takes.

    Args:
        num_ops: operators of the recipe, views included.
    """
    return constants.COMPILE_STEP_S + num_ops * constants.COMPILE_OP_S


def capture_seconds(num_recipes: int) -> float:
    """Return the seconds that capturing one HPU graph takes, when its recipes are compiled.

    Args:
        num_recipes: that the graph launches, each layer's counted.
    """
    return num_recipes * constants.CAPTURE_RECIPE_S


def graph_bytes(num_ops: int) -> int:
    """Return the memory that an HPU graph keeps in addition to its outputs.

    Args:
        num_ops: operators of all its recipes.
    """
    return int(num_ops * constants.GRAPH_BYTES_PER_OP)
