"""Bugs of the node: clients in other processes."""

from __future__ import annotations

from inturn.node.node import InProcessNode
from inturn.node.partition_commands import ConsumingCommands
from inturn.node.service_node import ServiceNode
from simulator.seeded_bugs.bug import Bugs

BUGS = Bugs()
_instead_of, _add_edit = BUGS.instead_of, BUGS.add_edit

_node_close = ServiceNode.close
_hung_up = ServiceNode.hung_up


_add_edit(
    "remote_lease_counts_as_local",
    "A restart of the node releases the leases of consumers in other processes, though the consumers live on.",
    ConsumingCommands,
    "outlive_node",
    "if (command.subject, command.group) in self._catalog.groups:",
    "if False:",
)


@_instead_of(ServiceNode, "hung_up")
def lost_stream_ends_the_leases(self: InProcessNode, session: object) -> None:
    """A lost stream releases the leases of its members, though the members may live on."""
    members = [one for one, through in self.members._sessions.items() if through is session]
    _hung_up(self, session)
    for one in members:
        for partition in self.broker.leases.release_all(self.catalog.group(one.subject, one.group), one.member):
            self.held.wake(("lease", one.subject, one.group, partition))


_add_edit(
    "asks_of_a_lost_stream_are_granted",
    "A held-back request of a lost stream stays, and a lease is granted to a lost client.",
    ServiceNode,
    "hung_up",
    "self.held.abandon(lambda reply: session_of(reply) is session)",
    "pass",
)


@_instead_of(ServiceNode, "close")
def leases_end_with_the_node(self: InProcessNode) -> None:
    """A graceful stop of the node ends all leases, also leases in use."""
    for group in self.catalog.groups.values():
        for owner in self.broker.leases.holders(group):
            self.broker.leases.release_all(group, owner)
    _node_close(self)
