"""Puts this folder on the path, where the tests below it find `conformance`."""
