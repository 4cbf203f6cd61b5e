"""A cluster: the meta server, broker servers, the streams between servers, and the router of clients.

`inturn.server` runs the servers; `inturn.client` uses the router.
"""
