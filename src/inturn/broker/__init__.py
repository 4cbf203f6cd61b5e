"""The broker of some partitions: appends, pulls, commits, leases, claims, key requests, growth gates, shared delivery.

The node calls this package, under the node's lock unless a docstring states otherwise.
"""
