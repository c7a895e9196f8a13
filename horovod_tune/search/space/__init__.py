"""Tune's domains and the model's space, and the way between them."""
