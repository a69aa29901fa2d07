"""Connections between launchers, in one loop."""

import asyncio
import contextlib
import socket

from gptddp.launch.links import Links, Seal, pack

WHO = [pack({"row": {"agent": "abc"}})]


def test_a_name_that_does_not_resolve_is_dialled_at_its_last_address():
    """The pods of a node that was silent for half a minute have no names until it is ready."""

    async def run():
        loop, known, came = asyncio.get_running_loop(), True, []
        resolve = loop.getaddrinfo

        async def getaddrinfo(host, *args, **options):
            if host == "pod-1" and not known:
                raise socket.gaierror(socket.EAI_NONAME, "unknown")
            return await resolve("127.0.0.1" if host == "pod-1" else host, *args, **options)

        async def until(count):
            async with asyncio.timeout(10):
                while len(came) < count:
                    await asyncio.sleep(0.01)

        def links():
            def greet():
                return [pack({"row": {"agent": it.agent}})]

            def take(agent, frame):
                came.append(agent)

            def seal(direction, nonces):
                return Seal("k" * 32, "id", direction, nonces)

            it = Links(seal, greet, take, died=lambda agent: None, host="", seeds=[])
            return it

        loop.getaddrinfo = getaddrinfo
        mine, theirs = links(), links()
        server = await asyncio.start_server(theirs.accept, "127.0.0.1", 0)
        mine.dial(f"pod-1:{server.sockets[0].getsockname()[1]}")
        await until(1)
        known = False
        theirs.begin_anew()  # all of its connections end
        await until(2)
        mine.end()
        server.close()

    asyncio.run(run())


def test_a_relay_between_two_others_cannot_forge_an_end():
    """If a stranger has a pod's address, only the end of a direct connection is a proof."""

    async def run():
        died, came = [], []

        def links(**calls):
            def seal(direction, nonces):
                return Seal("k" * 32, "id", direction, nonces)

            return Links(seal, lambda: WHO, **calls, host="", seeds=[])

        mine = links(take=lambda *said: None, died=died.append)
        theirs = links(take=lambda agent, frame: came.append(agent), died=died.append)
        server = await asyncio.start_server(theirs.accept, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        ends = []

        async def passed_on(reader, writer):
            with contextlib.suppress(OSError):
                while data := await reader.read(9999):
                    writer.write(data)
            writer.close()

        async def relay(reader, writer):
            source, sink = await asyncio.open_connection(host, port)
            ends.append(sink)
            await asyncio.gather(passed_on(reader, sink), passed_on(source, writer))

        async def until(true):
            async with asyncio.timeout(10):
                while not true():
                    await asyncio.sleep(0.01)

        stranger = await asyncio.start_server(relay, "127.0.0.1", 0)
        mine.dial(f"127.0.0.1:{stranger.sockets[0].getsockname()[1]}")
        await until(lambda: came)  # through the relay
        ends[0].close()
        await until(lambda: len(came) == 2)  # the agent connects again
        mine.dial(f"127.0.0.1:{port}")
        await until(lambda: len(came) == 3)
        ends[1].close()
        await asyncio.sleep(0.2)
        assert (died, len(came)) == ([], 3)
        mine.end()
        await until(lambda: died == ["abc"])  # the end of a direct connection is a proof
        server.close()
        stranger.close()
        await asyncio.sleep(0.1)

    asyncio.run(run())
