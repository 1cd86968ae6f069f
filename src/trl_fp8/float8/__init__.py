"""How a matmul is computed: FP8 training linears through TorchAO, and the switch back to high precision."""

from .convert import ConversionReport, convert_model
from .recipes import RECIPES, float8_config, layer_factory
from .shadow import high_precision


__all__ = ["RECIPES", "ConversionReport", "convert_model", "float8_config", "high_precision", "layer_factory"]
