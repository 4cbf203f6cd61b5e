"""A program with a consumer that runs the handler in processes: `python process_program.py FOLDER [leave]`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import inturn
from tests.consumer.process_handlers import NOTES, waits

if __name__ == "__main__":
    mq = inturn.connect(sys.argv[1], flush="os")
    mq.create_subject("line", 1)
    mq.handler("line", "g", order="key", processes=1)(waits)
    with mq.producer() as producer:
        producer.send_sync("line", b"wait", key="a")
    if sys.argv[2:] == ["leave"]:
        mq.consumer("line", "g", waits, order="key", processes=1).start()
        while not Path(os.environ[NOTES]).exists():
            time.sleep(0.01)
        sys.exit()  # without stopping: running handlers still finish
    mq.run()
    print(mq.group("line", "g").describe().partitions[0].committed, flush=True)
    mq.close()
