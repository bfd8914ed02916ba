"""Predicts seconds and bytes of the recipes and HPU graphs that a start makes for each shape."""

from vllm.cost_model import constants


def compile_seconds(num_ops: int) -> float:
    """Predict the seconds of compiling one recipe.

    Args:
        num_ops: operators of the recipe, views included.
    """
    return constants.COMPILE_STEP_S + num_ops * constants.COMPILE_OP_S


def capture_seconds(num_recipes: int) -> float:
    """Predict the seconds of capturing one HPU graph whose recipes are compiled.

    Args:
        num_recipes: number of recipes that the graph launches, counted for each layer.
    """
    return num_recipes * constants.CAPTURE_RECIPE_S


def graph_bytes(num_ops: int) -> int:
    """Predict the memory that an HPU graph keeps in addition to its outputs.

    Args:
        num_ops: operators of all its recipes.
    """
    return int(num_ops * constants.GRAPH_BYTES_PER_OP)
