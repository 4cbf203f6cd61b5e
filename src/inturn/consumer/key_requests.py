"""Key requests: what operators ask a consumer to do with a key. No I/O."""

from __future__ import annotations

from collections.abc import Callable

from inturn.consumer.dispatcher import Dispatcher
from inturn.consumer.lane import STRAIGHT, Lane
from inturn.consumer.parking import ParkingLot
from inturn.consumer.partition_state import PartitionState
from inturn.model.message import Message
from inturn.model.offsets import mark_of
from inturn.model.settings import KeyAction, LotState, Order
from inturn.protocol.commands import KeyRequest


class KeyRequests:
    """Carries out requests to park, resume or skip a key."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.acted: Callable[[PartitionState, KeyRequest], None] | None = None  # notified of requests in effect
        self._dispatcher = dispatcher

    def act_on_all(self, state: PartitionState) -> None:
        """Carry out the requests of a partition; requests of one key in the order of arrival."""
        if STRAIGHT in state.buffer.lanes:
            self._dispatcher.spread(state.buffer.lanes[STRAIGHT])
        waiting: list[KeyRequest] = []
        for request in state.progress.key_requests:
            if any(one.key == request.key for one in waiting) or not self.act(state, request):
                waiting.append(request)
            else:
                state.progress.changes.requests.append(request.id)
                if self.acted is not None:
                    self.acted(state, request)
        state.progress.key_requests = waiting

    def act(self, state: PartitionState, request: KeyRequest) -> bool:
        """Carry out a request; returns False if the request has to wait for a running handler."""
        lot = state.progress.parking_lots.get(request.key)
        lane = self._lane_of(state, request.key)
        if lane is not None and lane.run is not None and self._dispatcher.scheduler.withdraw(lane):
            self._dispatcher.go_on(lane)
        match request.kind:
            case KeyAction.PARK:
                return self._act_park(state, lot, lane, request)
            case KeyAction.RESUME:
                return self._act_resume(state, lot, lane, request.key)
            case KeyAction.SKIP:
                return self._act_skip(state, lot, lane, request)
        return True  # a request of a newer version is ignored

    def _lane_of(self, state: PartitionState, key: bytes) -> Lane | None:
        if self._dispatcher.order is not Order.PARTITION:
            return state.buffer.lanes.get(key)
        lane = state.buffer.lanes.get(None)
        return lane if lane is not None and lane.waiting and lane.messages[lane.at].key == key else None

    def _act_park(self, state: PartitionState, lot: ParkingLot | None, lane: Lane | None, request: KeyRequest) -> bool:
        if self._dispatcher.order is not Order.KEY or (lot is not None and lot.state is LotState.PARKED):
            return True
        if lane is None:
            lot = state.progress.parking_lots.setdefault(request.key, ParkingLot(request.key, LotState.PARKED))
            lot.state = LotState.PARKED
            lot.begin_again()
            state.progress.changes.of_lot(request.key, LotState.PARKED, request.why)
            return True
        lane.parks = request.why or "asked for"
        if lane.run is not None or state.progress.is_moving(lane):
            return False
        self._dispatcher.park(lane, lane.parks)
        return True

    def _act_resume(self, state: PartitionState, lot: ParkingLot | None, lane: Lane | None, key: bytes) -> bool:
        is_blocked = (
            lane is not None and lane.waiting and state.mark(lane.messages[lane.at]) in state.progress.exhausted
        )
        state.progress.reset_attempts(key)
        if lot is not None and lot.state is LotState.PARKED:
            lot.state = LotState.RESUMING
            state.progress.changes.of_lot(key, LotState.RESUMING)
        if lane is not None and is_blocked and lane.run is None and not state.progress.is_moving(lane):
            self._dispatcher.go_on(lane)
        return True

    def _act_skip(self, state: PartitionState, lot: ParkingLot | None, lane: Lane | None, request: KeyRequest) -> bool:
        offset, origin = request.offset, state.index if request.origin is None else request.origin
        if offset is None:
            return True
        if lane is not None and lane.run is not None:
            return False
        if lot is not None and lot.since_read is not None:
            return False  # the read in flight may return the message
        message = lane.messages[lane.at] if lane is not None and lane.waiting else None
        if lane is not None and message is not None and (message.partition, message.offset) == (origin, offset):
            if state.progress.is_moving(lane):
                return False
            self._drop_head(lane, message)
        elif origin != state.index or offset in state.progress.tracker:  # finished; or parked, if there is a lot
            if lot is not None:
                state.progress.changes.of_lot(lot.key, lot.state).removed.append((origin, offset))
            state.progress.settle(mark_of(origin, offset, state.index))
        elif offset >= state.buffer.pull_offset:
            state.progress.tracker.add([offset])  # a later pull leaves the message out
            state.progress.settle(offset)
        else:
            return False  # earlier messages of the same call are still to be repeated
        return True

    def _drop_head(self, lane: Lane, message: Message) -> None:
        lane.at += 1
        self._dispatcher.scheduler.unready(lane)
        if lane.lot is not None:
            lane.inbox.append(message)
            lane.state.collect_parked(lane)
        else:
            lane.state.finish([message])
        self._dispatcher.go_on(lane)
