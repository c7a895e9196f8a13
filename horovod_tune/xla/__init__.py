"""torch_xla ranks on TPUs: the launcher runs in the coordinator, a host actor on each host, ranks below it.

The only place that imports torch_xla.
"""
