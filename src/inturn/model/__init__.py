"""The data model: messages, batches, routes, offsets, settings and errors. All other packages import this package."""
