"""The node: commands in, answers out. Tables of command functions, long polls, acceptance and life cycle.

An embedded connection, the simulator and `inturn.cluster` build nodes from the services of this package.
"""
