"""A user's program whose session is one of Spark Connect: a process of its own, for it may not have another session.

Usage: python connect_client.py REMOTE URL DIRECTORY. It reads and writes topics in every way, and prints what it saw,
a JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from runnel import spark as runnel_spark
from runnel.errors import ClientFault


def main(remote: str, url: str, directory: Path) -> dict[str, Any]:
    spark = runnel_spark.session(master=remote)
    stored = spark.read.format("runnel").option("url", url).option("topics", "sensors").load()
    seen: dict[str, Any] = {
        "session": type(spark).__module__,
        "offsets": [row.offset for row in stored.where("offset > 7").orderBy("offset").collect()],
    }
    values = runnel_spark.json(stored, "celsius double").where("value.celsius > 5")
    values.selectExpr("cast(value.celsius AS string) AS payload", "key").write.format(
        "runnel"
    ).mode("append").options(url=url, topic="written", deadLetterTopic="dead/written").save()

    stream = spark.readStream.format("runnel").options(
        url=url, topics="sensors", startingOffsets="earliest"
    )
    query = (
        stream.load()
        .select("payload", "key", "tags", "event_time_ns")
        .writeStream.format("runnel")
        .options(url=url, topic="copied", checkpointLocation=str(directory / "copied"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()

    for into in ("topic:hot", f"table:{directory / 'hot'}"):
        done = runnel_spark.sql(
            spark,
            "SELECT celsius, station FROM STREAM sensors WHERE celsius > 5",
            into=into,
            url=url,
            schemas={"sensors": "celsius double, station string"},
            checkpoint=str(directory / f"checkpoint-{into[:5]}"),
            dead_letters=f"dead/{into[:5]}",
            once=True,
        )
        seen[into[:5]] = done.rows
    try:
        runnel_spark.sql(spark, "SELECT topc FROM sensors", into="topic:x", url=url)
    except ClientFault as error:
        seen["error"] = str(error)
    spark.stop()
    return seen


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
