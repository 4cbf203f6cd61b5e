"""Groups and brokers as meta knows them: membership, assignment of partitions, the registry of broker groups.

Nodes call these classes under their lock.
"""
