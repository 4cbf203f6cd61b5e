"""Logs of partitions: segments on disk, appends with group commit, reading, recovery, retention.

The broker uses logs through the interface in `engine`; `inturn doctor` uses `recovery` directly.
"""
