"""How samples are made: inference engines, environments, rewards."""
