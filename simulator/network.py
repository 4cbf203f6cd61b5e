"""The network between clients and the node: single commands, or the bytes of streams.

Without streams, single requests and answers are lost, and a request may arrive again much later than in any stream.
With streams, the client stream and the server session are the real classes.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from inturn.model.errors import InturnError
from inturn.protocol.commands import Answer, Command, Reply
from inturn.transport.client_stream import StreamSettings
from simulator.link import SimLink
from simulator.node import SimNode
from simulator.server import SimServer
from simulator.stream import Weather
from simulator.world import SimClient, World


class SimNetwork:
    def __init__(
        self,
        world: World,
        node: SimNode,
        coverage: Counter[str],
        weather: Weather,
        server: SimServer | None = None,
        link_settings: StreamSettings | None = None,
    ) -> None:
        """With a server, commands travel in streams."""
        self._world = world
        self._node = node
        self._coverage = coverage
        self._server = server
        self._link_settings = link_settings if link_settings is not None else StreamSettings()
        self.links: list[SimLink] = []
        self.weather = weather
        self.request_loss = 0.0
        self.answer_loss = 0.0
        self.repeat = 0.0

    def heal(self) -> None:
        self.request_loss = self.answer_loss = self.repeat = 0.0
        self.weather.clear()
        for link in self.links:
            link.block(to_node=False, to_client=False)

    def send(self, client: SimClient, command: Command, reply: Reply) -> None:
        if self._server is None:
            self._send_command(client, command, reply)
            return
        if client.link is None:
            client.link = SimLink(self._world, client, self._server, self._link_settings, self._coverage)
            self.links.append(client.link)
        client.link.submit(command, reply)

    def _send_command(self, client: SimClient, command: Command, reply: Reply) -> None:
        world = self._world
        if client.is_cut or world.happens(self.request_loss):
            self._coverage["network.request lost"] += 1
            return
        at_s = max(client.sent_until_s, world.now_s + world.spread(0.0002, self.weather.delay_s_max))
        client.sent_until_s = at_s
        deliver = partial(self._deliver, client, command, reply)
        world.after(at_s - world.now_s, deliver)
        if world.happens(self.repeat):
            self._coverage["network.request repeated"] += 1
            # Late enough to reach the next process of the node.
            world.after(at_s - world.now_s + world.spread(0.0, 6.0), deliver)

    def _deliver(self, client: SimClient, command: Command, reply: Reply) -> None:
        self._node.submit(command, partial(self._answer, client, reply))

    def _answer(self, client: SimClient, reply: Reply, answer: Answer | InturnError) -> None:
        if isinstance(answer, InturnError):
            self._coverage[f"error.{type(answer).__name__}"] += 1
        world = self._world
        if client.is_cut or client.is_dead or world.happens(self.answer_loss):
            self._coverage["network.answer lost"] += 1
            return
        at_s = world.now_s + world.spread(0.0002, self.weather.delay_s_max) + client.answers_late_s
        at_s = max(client.answered_until_s, at_s)
        client.answered_until_s = at_s
        client.later(at_s - world.now_s, lambda: reply(answer))
