"""Call a handler for every message on Spark, in order: once for the stored messages, or as an endless stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Unpack

from inturn.model.errors import InvalidInput
from inturn.model.settings import ConsumerSettings, Order
from inturn.security.credentials import Credentials
from inturn.security.settings import TlsSettings
from inturn.spark.ordered.admission import check_target
from inturn.spark.ordered.drain import Drain, DrainOptions
from inturn.spark.ordered.drain_report import DrainReport, Watch
from inturn.spark.ordered.task import ROUND_S
from inturn.spark.shipping import HandlerName, check_executors, load_handler, module_of, ship
from inturn.spark.source.options import credential_options, handler_options
from inturn.transport.address import is_address

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def for_each(
    spark: SparkSession,
    target: str,
    subject: str,
    group: str,
    handler: HandlerName,
    *,
    until: Mapping[int, int] | None = None,
    start: str = "first",
    watch: Watch | None = None,
    **options: Unpack[DrainOptions],
) -> DrainReport:
    """Call the handler for every unfinished message of the group, up to the offsets in `until` by partition, or up to
    the end of the log now. Messages of one key are handled in order, as by an online consumer; results, failures,
    parking and dead letters work in the same way. The group is taken over for the duration of the call, and the group's
    consumers continue afterwards. A new group begins at `start`. Partitions without an entry in `until` are left alone.
    Options are those of `drain`.
    """
    return Drain(spark, target, subject, group, handler, until=until, start=start, **options).run(watch)


def for_each_stream(
    spark: SparkSession,
    target: str,
    subject: str,
    group: str,
    handler: str,
    *,
    checkpoint: str,
    order: Order | str = Order.KEY,
    consumer: ConsumerSettings | None = None,
    start: str = "earliest",
    takes_over: bool = False,
    tasks: int | None = None,
    round_s: float = ROUND_S,
    max_messages_per_trigger: int | None = None,
    trigger: Mapping[str, str | bool] | None = None,
    name: str | None = None,
    token: str | None = None,
    tls: TlsSettings | None = None,
) -> StreamingQuery:
    """Start `for_each` as an endless stream. The query is a member of the group: the partitions are shared with other
    members and handed over as by any consumer. `handler` is "module:function". `trigger` holds the arguments of
    `DataStreamWriter.trigger`. `start` is the position of a new group, "earliest" or "latest".

    The rows of the stream are task outcomes, and this function discards the rows. To store the outcomes, use the
    source's option `handler`.
    """
    if not isinstance(handler, str):
        raise InvalidInput(f"handler {handler!r}: a stream starts its tasks by name; give it as 'module:function'")
    check_target(spark, target)
    load_handler(handler)
    modules = [one for one in [module_of(handler)] if one is not None]
    if ship(spark, modules):
        check_executors(spark, modules)
    options = handler_options(handler, order, consumer, takes_over=takes_over, round_s=round_s)
    reader = spark.readStream.format("inturn").option("subject", subject).option("group", group).options(**options)
    reader = reader.option("startingOffsets", start).options(**credential_options(Credentials(token, tls)))
    if tasks is not None:
        reader = reader.option("minPartitions", tasks)
    if max_messages_per_trigger is not None:
        reader = reader.option("maxMessagesPerTrigger", max_messages_per_trigger)
    reader = reader.option("server" if is_address(target) else "path", target)
    writer = reader.load().writeStream.format("noop").option("checkpointLocation", checkpoint)
    if name is not None:
        writer = writer.queryName(name)
    return writer.trigger(**(trigger or {"processingTime": "0 seconds"})).start()  # type: ignore[arg-type]
