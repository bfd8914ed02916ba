"""Images of GLM-4.5V and GLM-4.6V, which are as in GLM-4.1V."""

from vllm.multimodal.families.glm4v import Glm4vFamily

Family = Glm4vFamily
