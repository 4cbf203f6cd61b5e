"""inturn in an asyncio program: sends are awaited, handlers run in the program's own event loop.

Run: python examples/asyncio_orders.py [folder]
"""

import asyncio
import sys
import tempfile

from inturn import Context, Message, aio

STEPS = (b"created", b"paid", b"shipped")


async def main(folder: str) -> None:
    seen: dict[str | None, list[bytes]] = {}
    done = asyncio.Event()

    async def notify(message: Message, context: Context) -> None:
        await asyncio.sleep(0.001)  # a call to a remote service
        seen.setdefault(message.key_text, []).append(message.body)
        if sum(len(steps) for steps in seen.values()) == 30:
            done.set()

    async with aio.connect(folder) as mq:  # or inturn://host:7420
        await mq.create_subject("orders", partitions=2)
        async with mq.producer() as producer:
            for step in STEPS:
                await asyncio.gather(*(producer.send("orders", step, key=f"order-{n}") for n in range(10)))
        async with mq.consumer("orders", "notify", notify, order="key"):
            await asyncio.wait_for(done.wait(), 10)

    assert all(tuple(steps) == STEPS for steps in seen.values())
    print(f"{len(seen)} orders, each in its order: {', '.join(step.decode() for step in STEPS)}")


temporary = tempfile.TemporaryDirectory(prefix="inturn-")
asyncio.run(main(sys.argv[1] if sys.argv[1:] else temporary.name))
