"""The columns of the data source, for Spark and for Arrow."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from inturn.model.errors import InvalidInput

COLUMNS = StructType(
    [
        StructField("subject", StringType(), nullable=False),
        StructField("partition", IntegerType(), nullable=False),
        StructField("offset", LongType(), nullable=False),
        StructField("slot", IntegerType(), nullable=False),
        StructField("key", BinaryType(), nullable=True),
        StructField("body", BinaryType(), nullable=False),
        StructField("tags", ArrayType(StringType(), containsNull=False), nullable=False),
        StructField("properties", MapType(StringType(), StringType(), valueContainsNull=False), nullable=False),
        StructField("born_at", TimestampType(), nullable=False),
        StructField("stored_at", TimestampType(), nullable=False),
    ]
)


def check_columns(asked: StructType) -> None:
    """A schema that the user gave may leave columns out, which then are not made; it may not change any."""
    known = {field.name: field for field in COLUMNS}
    for field in asked:
        mine = known.get(field.name)
        if mine is None or mine.dataType.simpleString() != field.dataType.simpleString():
            raise InvalidInput(
                f"schema: there is no column '{field.name} {field.dataType.simpleString()}'; use some of "
                f"{', '.join(f'{one.name} {one.dataType.simpleString()}' for one in COLUMNS)}, or leave the schema out"
            )


def arrow_schema(asked: StructType) -> pa.Schema:
    """What Spark compares the first Arrow batch with, nullability and names of list items included."""
    return to_arrow_schema(asked, timezone="UTC")
