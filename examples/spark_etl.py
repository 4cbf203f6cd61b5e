"""A stream from a subject to Parquet files, with Spark: every run loads the messages since the previous run, once.

Needs the extra: pip install 'inturn[spark]'
"""

import tempfile
from pathlib import Path

import inturn
from inturn.spark import session

folder = Path(tempfile.mkdtemp())
spark = session("etl", "local[2]", config={"spark.sql.python.filterPushdown.enabled": True})


def load_what_is_new() -> None:
    """The checkpoint stores the position in the subject; a killed run is repeated from the checkpoint."""
    rows = (
        spark.readStream.format("inturn")
        .option("subject", "orders")
        .option("startingOffsets", "earliest")
        .option("maxMessagesPerTrigger", 200)  # per micro-batch; AvailableNow runs as many as needed
        .load(str(folder / "data"))
    )
    steps = rows.selectExpr("string(key) AS order_id", "string(body) AS step", "partition", "offset", "stored_at")
    query = (
        steps.writeStream.format("parquet")
        .option("path", str(folder / "orders"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def print_what_is_loaded() -> None:
    loaded = spark.read.parquet(str(folder / "orders"))
    print(f"{loaded.count()} rows of {loaded.select('order_id').distinct().count()} orders")


with inturn.connect(folder / "data") as mq:
    mq.create_subject("orders", partitions=4)
    for steps in (("created", "paid"), ("shipped",)):
        with mq.producer() as producer:
            for step in steps:
                for number in range(100):
                    producer.send("orders", step.encode(), key=f"order-{number}")
        load_what_is_new()
        print_what_is_loaded()

    # Without a stream: all messages of one order. Spark reads only the partition of the key.
    rows = spark.read.format("inturn").option("subject", "orders").load(str(folder / "data"))
    steps_of_7 = rows.where("key = 'order-7'").orderBy("offset").selectExpr("string(body) AS step")
    print("order-7:", ", ".join(row.step for row in steps_of_7.collect()))
spark.stop()
