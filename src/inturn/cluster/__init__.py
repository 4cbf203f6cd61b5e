"""A cluster: the meta server, broker servers, streams between them, and the router of clients.

`inturn.server` runs the servers; `inturn.client` uses the router.
"""
