"""How a matmul is computed: FP8 training linears through TorchAO, and the switch back to high precision."""

from .convert import ConversionReport, convert_model
from .recipes import RECIPES, Recipe, layer_factory
from .shadow import high_precision


__all__ = ["RECIPES", "ConversionReport", "Recipe", "convert_model", "high_precision", "layer_factory"]
