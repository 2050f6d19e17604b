"""The engine: fits a method on Lightning, keeps its checkpoints and draws its predictions."""
