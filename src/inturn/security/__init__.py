"""Security: TLS, tokens, access rules, quotas, and the guard that authenticates clients and authorizes commands.

The server and the transport call the guard; clients use `Credentials`.
"""
