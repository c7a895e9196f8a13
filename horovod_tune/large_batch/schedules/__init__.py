"""Learning rates over time: `curves` are functions of the time, `scheduler` and `plateau` apply them."""
