"""Servers of folders: the folder and its lock, the server, metrics over HTTP, and the checks of `inturn doctor`.

The CLI and embedded connections call this package.
"""
