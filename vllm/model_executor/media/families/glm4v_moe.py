"""The vision tower of GLM-4.5V and GLM-4.6V, which is the same as in GLM-4.1V."""

from vllm.model_executor.media.families.glm4v import Glm4vEncoder

Encoder = Glm4vEncoder
