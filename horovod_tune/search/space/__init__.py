"""Translation between Tune's domains and the model's space."""
