"""Which producers were opened, with which epoch: batches are taken from those only.

A log takes any id for a producer that it has not heard yet. Whoever made up an id, or an epoch, would have its
sequences taken for those of the producer that gets the id next, or would fence it in that partition for good.
"""

from __future__ import annotations

from inturn.log.producer_table import NOBODY
from inturn.model.batch import Batch
from inturn.model.errors import InvalidInput, NotFound, ProducerFenced
from inturn.model.subject import check_name
from inturn.protocol.commands import NamedProducer
from inturn.store.producers import FIRST_EPOCH, OpenedProducer, Producers


class ProducerIds:
    """`open` is called under the node's lock, `check` without: an id is known here before it is given out.

    In a cluster meta gives them out. A broker has heard of named ones, and cannot tell what of the rest is made up."""

    def __init__(self, producers: Producers) -> None:
        self._producers = producers
        self.gives_out = True
        self._newest = producers.newest_id()
        self._epochs = producers.epochs()  # of named ones; all others have the first
        self._names: dict[int, str] = {}

    def open(self, name: str | None, nonce: str | None = None) -> OpenedProducer:
        """See `Producers.open`. InvalidInput for what is no name."""
        if name is not None:
            check_name("producer", name)
        opened = self._producers.open(name, nonce)
        if name is not None:
            self._epochs[opened.id] = opened.epoch
            self._names[opened.id] = name
        self._newest = max(self._newest, opened.id)
        return opened

    def learn(self, producer: NamedProducer) -> None:
        """It was opened elsewhere: from now on older epochs are fenced."""
        self._producers.learn(producer)
        known = self._epochs.get(producer.producer_id, producer.epoch)
        self._epochs[producer.producer_id] = max(producer.epoch, known)
        self._names[producer.producer_id] = producer.name

    def check(self, batch: Batch) -> None:
        """ProducerFenced if a newer one has the name; NotFound or InvalidInput for what was never given out."""
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
            raise InvalidInput(f"producer {producer_id}: epoch {epoch} was not given out; it is {current}")
