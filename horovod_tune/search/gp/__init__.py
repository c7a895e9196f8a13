"""The Gaussian process: kernels, fit, posterior, acquisition, and the search for the next point."""
