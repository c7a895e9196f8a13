"""What a training function calls: `report()`, checkpoints, commits."""
