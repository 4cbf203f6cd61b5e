"""The outbox: messages in a table of the user's database, and the scanner that sends the messages. `inturn.Outbox` is
the entry; producers use an outbox as fallback."""
