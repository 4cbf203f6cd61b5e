"""The opened producers and their epochs: only batches of opened producers are accepted.

A log accepts any id of an unknown producer. A client with an invented id or epoch could pass its sequences off as
those of the next producer with this id, or fence that producer in the partition for good.
"""

from __future__ import annotations

from inturn.log.producer_table import NOBODY
from inturn.model.batch import Batch
from inturn.model.errors import InvalidInput, NotFound, ProducerFenced
from inturn.model.subject import check_name
from inturn.protocol.commands import NamedProducer
from inturn.store.producers import FIRST_EPOCH, OpenedProducer, Producers


class ProducerIds:
    """`open` is called under the node's lock, `check` without: an id is known here before the client receives the id.

    In a cluster, meta assigns the ids. A broker knows the named producers only, and cannot recognise invented ids of
    unnamed producers.
    """

    def __init__(self, producers: Producers) -> None:
        self._producers = producers
        self.gives_out = True
        self._newest = producers.newest_id()
        self._epochs = producers.epochs()  # of named producers; unnamed producers have the first epoch
        self._names: dict[int, str] = {}

    def open(self, name: str | None, nonce: str | None = None) -> OpenedProducer:
        """See `Producers.open`. Raises InvalidName."""
        if name is not None:
            check_name("producer", name)
        opened = self._producers.open(name, nonce)
        if name is not None:
            self._epochs[opened.id] = opened.epoch
            self._names[opened.id] = name
        self._newest = max(self._newest, opened.id)
        return opened

    def learn(self, producer: NamedProducer) -> None:
        """Store a producer that was opened on a different server. From now on, older epochs are fenced."""
        self._producers.learn(producer)
        known = self._epochs.get(producer.producer_id, producer.epoch)
        self._epochs[producer.producer_id] = max(producer.epoch, known)
        self._names[producer.producer_id] = producer.name

    def check(self, batch: Batch) -> None:
        """Raise ProducerFenced if a newer producer has the name; NotFound or InvalidInput for an id or epoch that was
        never assigned."""
        producer_id, epoch = batch.producer_id, batch.producer_epoch
        if producer_id == NOBODY:
            return
        current = self._epochs.get(producer_id, FIRST_EPOCH)
        if epoch < current:
            raise ProducerFenced(self._names.get(producer_id, str(producer_id)), epoch, current)
        if not self.gives_out:
            return
        if producer_id > self._newest:
            raise NotFound("producer", str(producer_id), f"the newest is {self._newest}; open one first: producer()")
        if epoch > current:
            raise InvalidInput(
                f"producer {producer_id}: epoch {epoch} was never assigned; the current epoch is {current}"
            )
