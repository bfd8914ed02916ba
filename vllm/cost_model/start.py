"""Predicts the seconds and bytes that a start needs to compile recipes and capture HPU graphs."""

from vllm.cost_model import constants


def compile_seconds(num_ops: int) -> float:
    """Predict the seconds of compiling one recipe.

    Args:
        num_ops: operators of the recipe, views included.
    """
    return constants.COMPILE_STEP_S + num_ops * constants.COMPILE_OP_S


def capture_seconds(num_recipes: int) -> float:
    """Predict the seconds of capturing one HPU graph whose recipes are compiled already.

    Args:
        num_recipes: number of recipes in the graph. A recipe that several layers use counts once
            for each of these layers.
    """
    return num_recipes * constants.CAPTURE_RECIPE_S


def graph_bytes(num_ops: int) -> int:
    """Predict the memory that an HPU graph keeps in addition to its outputs.

    Args:
        num_ops: operators of all its recipes.
    """
    return int(num_ops * constants.GRAPH_BYTES_PER_OP)
