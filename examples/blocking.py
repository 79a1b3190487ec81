"""The same without `await`: for scripts, threads and notebooks.

python examples/blocking.py [URL]
"""

import sys

import runnel

with runnel.connect_blocking(*sys.argv[1:]) as bus:
    with bus.publisher("log/web") as publisher:  # from any thread; blocks while its buffer is full
        for number in range(10_000):
            publisher.send(b"GET /%d" % number)
    print(bus.topic("log/web").messages, "messages in log/web")
    with bus.subscribe("log/*", start="earliest") as lines:
        for message in lines:
            if message.payload == b"GET /9999":
                print("the last is at offset", message.offset)
                break
