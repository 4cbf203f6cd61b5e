"""All commands of clients and all answers of nodes. These structs are the protocol.

Every command is answered once: by an answer, or by an InturnError. The node holds a command with `wait_s` back until
an answer exists, or the time is over (long poll). Any command may be repeated after a lost answer: most repeats have no
effect; a Move stores the messages again, and a SteerKey that skips has to name the offset. A partition is given by its
index in the subject's route.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from inturn.model.errors import InturnError
from inturn.model.subject import Subject
from inturn.protocol.admin import BrokerGroupDescription as BrokerGroupDescription
from inturn.protocol.admin import BrokerGroupList as BrokerGroupList
from inturn.protocol.admin import ClaimDescription as ClaimDescription
from inturn.protocol.admin import CreateSubject as CreateSubject
from inturn.protocol.admin import DescribeGroup as DescribeGroup
from inturn.protocol.admin import DescribeNode as DescribeNode
from inturn.protocol.admin import DescribeSubject as DescribeSubject
from inturn.protocol.admin import DiskRoom as DiskRoom
from inturn.protocol.admin import FindSubject as FindSubject
from inturn.protocol.admin import GroupDescription as GroupDescription
from inturn.protocol.admin import GroupList as GroupList
from inturn.protocol.admin import GroupName as GroupName
from inturn.protocol.admin import GroupPartition as GroupPartition
from inturn.protocol.admin import GrowSubject as GrowSubject
from inturn.protocol.admin import ListBrokerGroups as ListBrokerGroups
from inturn.protocol.admin import ListGroups as ListGroups
from inturn.protocol.admin import ListSubjects as ListSubjects
from inturn.protocol.admin import MemberDescription as MemberDescription
from inturn.protocol.admin import NodeDescription as NodeDescription
from inturn.protocol.admin import PartitionDescription as PartitionDescription
from inturn.protocol.admin import ReadyPart as ReadyPart
from inturn.protocol.admin import ResetGroup as ResetGroup
from inturn.protocol.admin import RestlessLease as RestlessLease
from inturn.protocol.admin import SetBrokerGroup as SetBrokerGroup
from inturn.protocol.admin import SetOrder as SetOrder
from inturn.protocol.admin import ShutGate as ShutGate
from inturn.protocol.admin import SubjectDescription as SubjectDescription
from inturn.protocol.admin import SubjectList as SubjectList
from inturn.protocol.cluster import BrokerOrders as BrokerOrders
from inturn.protocol.cluster import Catalogue as Catalogue
from inturn.protocol.cluster import FindGroup as FindGroup
from inturn.protocol.cluster import FindMessage as FindMessage
from inturn.protocol.cluster import ForgetMember as ForgetMember
from inturn.protocol.cluster import GroupOpened as GroupOpened
from inturn.protocol.cluster import LearnProducer as LearnProducer
from inturn.protocol.cluster import LearnSubject as LearnSubject
from inturn.protocol.cluster import ListRequests as ListRequests
from inturn.protocol.cluster import NamedProducer as NamedProducer
from inturn.protocol.cluster import OpenGroup as OpenGroup
from inturn.protocol.cluster import ReadCatalogue as ReadCatalogue
from inturn.protocol.cluster import ReportBroker as ReportBroker
from inturn.protocol.cluster import RequestList as RequestList
from inturn.protocol.cluster import Sealed as Sealed
from inturn.protocol.cluster import SealSubject as SealSubject
from inturn.protocol.command import Command as Command
from inturn.protocol.command import Done as Done
from inturn.protocol.command import Hello as Hello
from inturn.protocol.command import Ping as Ping
from inturn.protocol.command import Welcome as Welcome
from inturn.protocol.consuming import Acknowledge as Acknowledge
from inturn.protocol.consuming import Acknowledged as Acknowledged
from inturn.protocol.consuming import Acquire as Acquire
from inturn.protocol.consuming import Assignment as Assignment
from inturn.protocol.consuming import Claim as Claim
from inturn.protocol.consuming import Commit as Commit
from inturn.protocol.consuming import Committed as Committed
from inturn.protocol.consuming import Delivery as Delivery
from inturn.protocol.consuming import Failure as Failure
from inturn.protocol.consuming import Fetch as Fetch
from inturn.protocol.consuming import Fetched as Fetched
from inturn.protocol.consuming import Granted as Granted
from inturn.protocol.consuming import Heartbeat as Heartbeat
from inturn.protocol.consuming import Leave as Leave
from inturn.protocol.consuming import Move as Move
from inturn.protocol.consuming import OpenDeadLetters as OpenDeadLetters
from inturn.protocol.consuming import OpenRetry as OpenRetry
from inturn.protocol.consuming import PartitionReceipts as PartitionReceipts
from inturn.protocol.consuming import Progress as Progress
from inturn.protocol.consuming import Pull as Pull
from inturn.protocol.consuming import Pulled as Pulled
from inturn.protocol.consuming import Receipt as Receipt
from inturn.protocol.consuming import Release as Release
from inturn.protocol.consuming import Renew as Renew
from inturn.protocol.consuming import Renewed as Renewed
from inturn.protocol.consuming import Returned as Returned
from inturn.protocol.keys import DescribeKey as DescribeKey
from inturn.protocol.keys import FindRequest as FindRequest
from inturn.protocol.keys import FindTrial as FindTrial
from inturn.protocol.keys import KeyDescription as KeyDescription
from inturn.protocol.keys import KeyDetails as KeyDetails
from inturn.protocol.keys import KeyList as KeyList
from inturn.protocol.keys import KeyRequest as KeyRequest
from inturn.protocol.keys import ListKeys as ListKeys
from inturn.protocol.keys import Lot as Lot
from inturn.protocol.keys import LotChange as LotChange
from inturn.protocol.keys import LotContent as LotContent
from inturn.protocol.keys import ParkedMessage as ParkedMessage
from inturn.protocol.keys import ReadLot as ReadLot
from inturn.protocol.keys import ReportTrial as ReportTrial
from inturn.protocol.keys import RequestState as RequestState
from inturn.protocol.keys import SteerKey as SteerKey
from inturn.protocol.keys import Trial as Trial
from inturn.protocol.keys import TrialState as TrialState
from inturn.protocol.keys import TryMessage as TryMessage
from inturn.protocol.producing import Append as Append
from inturn.protocol.producing import Appended as Appended
from inturn.protocol.producing import Offsets as Offsets
from inturn.protocol.producing import OpenProducer as OpenProducer
from inturn.protocol.producing import ProducerOpened as ProducerOpened
from inturn.protocol.producing import Read as Read
from inturn.protocol.producing import ResolvePosition as ResolvePosition

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
    """The receiver of commands: a node in this process, or a connection to a node."""

    def submit(self, command: Command, reply: Reply) -> None:
        """Returns at once. `reply` is called exactly once, in any thread, maybe before this call returns."""
        ...
