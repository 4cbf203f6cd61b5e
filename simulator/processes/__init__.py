"""Fault runs with real processes: a server, consumers and producers that are killed, frozen and cut off.

`run.run_processes` runs a history and judges the result; `soak` runs histories in sequence. A run can be repeated with
its seed, but not replayed event by event: the machine decides when exactly a fault hits.
"""
