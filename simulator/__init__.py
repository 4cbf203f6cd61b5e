"""A simulator of inturn: the real node, producers and consumers in virtual time, with faults, judged by the checker.

The same seed gives the same history, event by event. Run many seeds, and replay a seed that failed:

    python -m simulator.soak --seeds 1000
    python -m simulator.soak --seed 7

or from Python, `simulate(seed=7)` of `simulator.simulation` returns a report with the history, the faults and the
problems found. A history that fails can be saved with `--save FOLDER` and judged again.

- simulation: a history from start to verdict; `settings` chooses the settings of a history, `aftermath` judges the
result.
- world, node, disk, network, server, link, stream: time, the node on a simulated disk, and the network with streams.
- consumer, producer, drain, claims, workload: clients, Spark drains, messages, growth, and an operator.
- faults: the faults. soak: many histories in several processes, and the required coverage.
- traces: the rows of a trace from a history, for the audit.
- seeded_bugs: bugs on purpose; tests check that the simulation finds all of the bugs.
- processes: real processes with real faults (kill -9, SIGSTOP, a bad network): `python -m simulator.processes.soak`.
"""
