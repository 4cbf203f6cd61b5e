"""What a client can ask of a node, and what it answers. These structs are the protocol.

Every command is answered once: by its answer, or by an InturnError. Commands with `wait_s` are held back by the
node until there is something to say, or the time is over (long poll). All of them may be repeated after a lost answer:
most change nothing then; a Move stores its messages again, and a SteerKey that skips has to name the offset that it
means. Partitions are given by their index in the subject's route.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from inturn.model.commands.broker_groups import BrokerGroupDescription as BrokerGroupDescription
from inturn.model.commands.broker_groups import BrokerGroupList as BrokerGroupList
from inturn.model.commands.broker_groups import ListBrokerGroups as ListBrokerGroups
from inturn.model.commands.broker_groups import SetBrokerGroup as SetBrokerGroup
from inturn.model.commands.cluster import BrokerOrders as BrokerOrders
from inturn.model.commands.cluster import Catalogue as Catalogue
from inturn.model.commands.cluster import FindGroup as FindGroup
from inturn.model.commands.cluster import FindMessage as FindMessage
from inturn.model.commands.cluster import ForgetMember as ForgetMember
from inturn.model.commands.cluster import GroupOpened as GroupOpened
from inturn.model.commands.cluster import LearnProducer as LearnProducer
from inturn.model.commands.cluster import LearnSubject as LearnSubject
from inturn.model.commands.cluster import ListRequests as ListRequests
from inturn.model.commands.cluster import NamedProducer as NamedProducer
from inturn.model.commands.cluster import OpenGroup as OpenGroup
from inturn.model.commands.cluster import ReadCatalogue as ReadCatalogue
from inturn.model.commands.cluster import ReportBroker as ReportBroker
from inturn.model.commands.cluster import RequestList as RequestList
from inturn.model.commands.cluster import Sealed as Sealed
from inturn.model.commands.cluster import SealSubject as SealSubject
from inturn.model.commands.command import Command as Command
from inturn.model.commands.command import Done as Done
from inturn.model.commands.connecting import Hello as Hello
from inturn.model.commands.connecting import Ping as Ping
from inturn.model.commands.connecting import Welcome as Welcome
from inturn.model.commands.consuming import Commit as Commit
from inturn.model.commands.consuming import Committed as Committed
from inturn.model.commands.consuming import Progress as Progress
from inturn.model.commands.consuming import Pull as Pull
from inturn.model.commands.consuming import Pulled as Pulled
from inturn.model.commands.consuming import Release as Release
from inturn.model.commands.groups import ClaimDescription as ClaimDescription
from inturn.model.commands.groups import DescribeGroup as DescribeGroup
from inturn.model.commands.groups import GroupDescription as GroupDescription
from inturn.model.commands.groups import GroupList as GroupList
from inturn.model.commands.groups import GroupName as GroupName
from inturn.model.commands.groups import GroupPartition as GroupPartition
from inturn.model.commands.groups import ListGroups as ListGroups
from inturn.model.commands.groups import MemberDescription as MemberDescription
from inturn.model.commands.groups import ResetGroup as ResetGroup
from inturn.model.commands.groups import SetOrder as SetOrder
from inturn.model.commands.groups import ShutGate as ShutGate
from inturn.model.commands.keys import DescribeKey as DescribeKey
from inturn.model.commands.keys import FindRequest as FindRequest
from inturn.model.commands.keys import KeyDescription as KeyDescription
from inturn.model.commands.keys import KeyDetails as KeyDetails
from inturn.model.commands.keys import KeyList as KeyList
from inturn.model.commands.keys import KeyRequest as KeyRequest
from inturn.model.commands.keys import ListKeys as ListKeys
from inturn.model.commands.keys import RequestState as RequestState
from inturn.model.commands.keys import SteerKey as SteerKey
from inturn.model.commands.leasing import Acquire as Acquire
from inturn.model.commands.leasing import Claim as Claim
from inturn.model.commands.leasing import Failure as Failure
from inturn.model.commands.leasing import Granted as Granted
from inturn.model.commands.leasing import Renew as Renew
from inturn.model.commands.leasing import Renewed as Renewed
from inturn.model.commands.membership import Assignment as Assignment
from inturn.model.commands.membership import Heartbeat as Heartbeat
from inturn.model.commands.membership import Leave as Leave
from inturn.model.commands.moving import Move as Move
from inturn.model.commands.moving import OpenDeadLetters as OpenDeadLetters
from inturn.model.commands.moving import OpenRetry as OpenRetry
from inturn.model.commands.nodes import DescribeNode as DescribeNode
from inturn.model.commands.nodes import DiskRoom as DiskRoom
from inturn.model.commands.nodes import NodeDescription as NodeDescription
from inturn.model.commands.nodes import ReadyPart as ReadyPart
from inturn.model.commands.nodes import RestlessLease as RestlessLease
from inturn.model.commands.parking import Lot as Lot
from inturn.model.commands.parking import LotChange as LotChange
from inturn.model.commands.parking import LotContent as LotContent
from inturn.model.commands.parking import ParkedMessage as ParkedMessage
from inturn.model.commands.parking import ReadLot as ReadLot
from inturn.model.commands.producing import Append as Append
from inturn.model.commands.producing import Appended as Appended
from inturn.model.commands.producing import OpenProducer as OpenProducer
from inturn.model.commands.producing import ProducerOpened as ProducerOpened
from inturn.model.commands.reading import Offsets as Offsets
from inturn.model.commands.reading import Read as Read
from inturn.model.commands.reading import ResolvePosition as ResolvePosition
from inturn.model.commands.sharing import Acknowledge as Acknowledge
from inturn.model.commands.sharing import Acknowledged as Acknowledged
from inturn.model.commands.sharing import Delivery as Delivery
from inturn.model.commands.sharing import Fetch as Fetch
from inturn.model.commands.sharing import Fetched as Fetched
from inturn.model.commands.sharing import PartitionReceipts as PartitionReceipts
from inturn.model.commands.sharing import Receipt as Receipt
from inturn.model.commands.sharing import Returned as Returned
from inturn.model.commands.subjects import CreateSubject as CreateSubject
from inturn.model.commands.subjects import DescribeSubject as DescribeSubject
from inturn.model.commands.subjects import FindSubject as FindSubject
from inturn.model.commands.subjects import GrowSubject as GrowSubject
from inturn.model.commands.subjects import ListSubjects as ListSubjects
from inturn.model.commands.subjects import PartitionDescription as PartitionDescription
from inturn.model.commands.subjects import SubjectDescription as SubjectDescription
from inturn.model.commands.subjects import SubjectList as SubjectList
from inturn.model.commands.trials import FindTrial as FindTrial
from inturn.model.commands.trials import ReportTrial as ReportTrial
from inturn.model.commands.trials import Trial as Trial
from inturn.model.commands.trials import TrialState as TrialState
from inturn.model.commands.trials import TryMessage as TryMessage
from inturn.model.errors import InturnError
from inturn.model.subject import Subject

Answer: TypeAlias = (
    Welcome
    | ProducerOpened
    | Appended
    | Assignment
    | Done
    | Granted
    | Renewed
    | Pulled
    | Committed
    | Subject
    | SubjectList
    | SubjectDescription
    | Offsets
    | GroupList
    | GroupDescription
    | LotContent
    | KeyRequest
    | RequestState
    | Trial
    | TrialState
    | KeyList
    | KeyDetails
    | NodeDescription
    | Fetched
    | Acknowledged
    | BrokerGroupDescription
    | BrokerGroupList
    | BrokerOrders
    | Catalogue
    | Sealed
    | GroupOpened
    | RequestList
)
Reply: TypeAlias = Callable[[Answer | InturnError], None]


class Node(Protocol):
    """Where commands go: a node in this process, or a connection to one."""

    def submit(self, command: Command, reply: Reply) -> None:
        """Returns at once. `reply` is called exactly once, from any thread, maybe before this returns."""
        ...
