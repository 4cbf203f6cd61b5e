"""The producer: queues, send batches, hooks and the fallback outbox. `Connection.producer` makes producers."""
