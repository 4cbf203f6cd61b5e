"""The consumer: pulls messages under leases, runs handlers in lanes, and commits the progress. `client` creates
consumers; `spark` and `cli` create consumers with a scope."""
