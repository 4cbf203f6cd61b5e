"""The demo of inturn: four acts with verdicts. `make demo` or `inturn demo` plays the acts in a temporary folder.

1. crash: consumers share partitions, a consumer dies, a new consumer joins (order by partition).
2. keys: the same messages ordered by key; a poisoned key is parked and resumed.
3. served: a server and three consumers as processes; kill -9 ends one consumer.
4. incident: a backlog, a drain on Spark, an audit of all traces, and the page demo-report.html.

An act has a story (`Act`), a state (`Board`), a live picture (`View`) and a result (`ActResult`). The base classes are
in `act` and `view`; `crash`, `keys`, `served` and `incident` hold the acts, and `*_view` the pictures.
"""
