"""Connections between launchers, in one loop."""

import asyncio
import socket

from gptddp.launch.links import Links, Seal, pack


def test_a_name_that_is_gone_is_dialled_where_it_was():
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
