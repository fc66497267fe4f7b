"""How samples are learned from: model engine, losses, advantages, corrections, packing, checkpoints."""
