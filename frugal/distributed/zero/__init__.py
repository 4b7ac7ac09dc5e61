"""DeepSpeed ZeRO as a strategy: all of the product that knows DeepSpeed."""
