"""The store: the database of a node with the rows of subjects, groups, leases, progress, keys and producers.

The broker, meta and the node call this package.
"""
