"""The worlds of a life: its ranks move from one world to the next, and no process ends.

A world ends when a rank is lost, or when all ranks learn at the same step (`Life.agree`) that
their launchers agree on another view: a pod joins or leaves. Then each rank takes the newest view,
and all compare their states. The state of the highest step wins. A rank with another step, or a new
rank without a state, gets it from a rank that has it. The interrupted step is done again, with the
same rows.

Without gptddp's launcher a life has one world (`is_static`), and a lost peer ends the life. The
*records* are ledger, log and lease, which rank 0 holds.
"""

import errno
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gptddp import live
from gptddp.distributed import connect, pulse
from gptddp.distributed.lost import is_lost_peer, said
from gptddp.distributed.members import AT_END, TOLD, LeaseAsked, Out, View
from gptddp.errors import LifeLost, Stopped
from gptddp.model.sums import Sums
from gptddp.run import moves
from gptddp.run.lease import EXPIRY_S, Lease
from gptddp.training.begin import GONE_S, introduce, pack_first_rows
from gptddp.training.compare import compare
from gptddp.training.end import WAIT_S
from gptddp.training.parts import LifeParts
from gptddp.training.takeover import Proof, Takeover

_POLL_S = 0.25
_BROKEN_S = 1.0  # after a failed collective: if no loss is reported, only connections failed
_TRIES = 3  # of a joiner to form a world with the same members, who would wait for ever
_ALL_S = 1.0  # after a request to stop: if all ranks are asked, all have the request by then
# For the next view, after a request to stop, so that the state is saved: a tie may take as long.
_STOPS_S = EXPIRY_S + 8.0
ALONE_S = 3.0  # between two saves while only one pod has the state

log = logging.getLogger(__name__)


class Worlds:
    """All ranks: the present world of a life, and the move into the next."""

    def __init__(self, life: LifeParts, sums: Sums) -> None:
        self.life_is_over = False
        self.ends = False  # the present world ends: agreed after a step, or a peer is lost
        self.save_soon = False  # a rank left because it was asked to stop
        self.takeover: Takeover | None = None  # on a new rank 0, until it has the records
        self._life, self._world, self._sums = life, life.world, sums
        view = self._world.view
        self._number = view.number if view else 0  # of the last view taken; 0: none
        self._failed = 0  # views in a row whose world, with the same members, was not formed
        # the pod of each member of the last world entered, by rank
        self._pods = dict(zip(view.ids, self._world.pods, strict=True)) if view else {}
        self._how: dict[str, str] = {}  # how each member was lost since then
        self._noticed: float | None = None  # monotonic: when the end of the world was noticed
        self._proof: Proof | None = None  # the claim to the lease that the launcher asks for
        self._lease: Lease | None = None  # taken as the proof for a view

    @contextmanager
    def around(self) -> Iterator[None]:
        """All ranks: enter the newest world, then run the body until it or the world ends."""
        while not self._is_entered():
            pass
        try:
            yield
        except Exception as error:
            if not self._is_survived(error):
                raise

    def _is_survived(self, error: Exception) -> bool:
        """Does this error end the world only? While the state is changing, it ends the life."""
        if self._world.is_static or self._life.live.is_changing or not is_lost_peer(error):
            return False
        log.info("[rank %d] another world is due: %s", self._world.rank, said(error))
        self.ends = True
        self._noticed = self._noticed or time.monotonic()
        return True

    def _is_entered(self) -> bool:
        """Enter the newest world; False if that world ends meanwhile."""
        life = self._life
        try:
            moved = self.ends or not life.live.is_whole  # the second: this rank has just joined
            if moved:
                self._form()
                records = life.recorder is not None or self.takeover is not None
                self._tell(*compare(life, self._sums.layout(), records))
            life.go_on(moved)
            introduce(life)
            if self._world.members:
                self._world.members.status("going")
            self.ends = False
            self._wait()
        except Exception as error:
            if not self._is_survived(error):
                raise
            return False
        return True

    # -- into a world ------------------------------------------------------------------------------

    def _form(self) -> None:
        """Form the world of the newest view. Raises LostPeer if a member of it is lost."""
        members, life = self._world.members, self._life
        assert members
        self._noticed = self._noticed or time.monotonic()
        live.phase("forming another world")
        life.clock.enter("other")
        pulse.allow(connect.FIRST_TIMEOUT_S)
        if not life.live.is_whole:
            members.status("warm")
        last, view = self._world.view, self._newest()
        self._failed = self._failed if last and last.ids == view.ids else 0
        if self._failed >= _TRIES and members.me not in self._pods:  # it was in no world yet
            raise LifeLost("this worker cannot be connected with the others: allow them all ports")
        self._pods = self._pods or {it.id: it.pod for it in view.members if it.id != members.me}
        self._number = view.number
        self._how |= {it.id: it.how for it in view.gone}
        if life.live.is_whole:  # packing begins while the ranks meet
            life.rows.move(life.progress.data, view.ids, members.me)
        self._failed += 1
        self._world.form(view)
        self._failed = 0

    def _newest(self) -> View:
        """Wait for a view newer than the last; meanwhile answer the launcher's requests."""
        members, life, since = self._world.members, self._life, time.monotonic()
        assert members
        while True:
            pulse.beat()
            if life.stop.asked and life.stop.waited_s > _STOPS_S:
                members.leave(TOLD)
                raise Stopped(f"{life.stop.cause} after step {life.step}, while waiting for others")
            found = members.next_view(self._number, _POLL_S)
            if isinstance(found, View):
                self._proof = None
                return found
            if isinstance(found, Out):
                self._come_back()
                since = time.monotonic()
            elif isinstance(found, LeaseAsked):
                if self._proof is None or self._proof.asked != found:
                    self._proof = self._prove(found)
                if lease := self._proof.held(_POLL_S):
                    self._lease = lease
                    members.answer(found)
            elif not life.live.is_whole:
                if members.is_going:
                    since = time.monotonic()
                elif time.monotonic() - since > GONE_S:
                    raise LifeLost("the world that this worker was to join has ended")
            elif since and time.monotonic() - since > _BROKEN_S and self._world.view:
                since = 0.0
                members.broken(self._world.view)

    def _prove(self, asked: LeaseAsked) -> Proof:
        """Claim the lease, as a proof for the launcher. In a minority, rank 0 gives it up first."""
        if asked.how != "tie":
            if self.takeover:
                self.takeover.give_up()
            if self._lease:
                self._lease.close()
            self.takeover = self._lease = None
        return Proof(asked, self._life, self.takeover, self._lease)

    def _come_back(self) -> None:
        """Rejoin: the others continue without this process, which gets their state as a new member.

        With records or lease it ends: its writes would be of a replaced generation (LifeLost).
        """
        if self._life.recorder or self.takeover or self._lease:
            raise LifeLost("the other ranks continued without this process, with another rank 0")
        log.warning("[rank %d] the other ranks continued without it: it rejoins", self._world.rank)
        assert self._world.members
        self._world.members.rejoin()
        self._world.alone()
        self._number, self._proof, self._pods = 0, None, {}
        self._life.live.is_whole = self._life.stop.holds = False
        pack_first_rows(self._life)
        live.phase("joining the running ranks")
        self._world.members.status("warm")

    def _tell(self, giver: int, is_new: bool) -> None:
        """All ranks: record the change of the world; rank 0 may have to take over the records."""
        life, world, view = self._life, self._world, self._world.view
        assert view and self._noticed is not None
        event: Any = None
        if world.rank == giver:
            old, pods = self._pods, list(world.pods)
            new = [rank for rank, id in enumerate(view.ids) if id not in old]
            event = {
                "event": "world",
                "time": time.time(),
                "generation": life.generation,
                "step": life.step,
                "world_size": world.world_size,
                "nodes": world.nodes,
                "pods": pods,
                "machines": life.machines,
                "lost": [
                    {"rank": rank, "pod": pod, "how": self._how.get(id, "it is lost")}
                    for rank, (id, pod) in enumerate(old.items())
                    if id not in view.ids
                ],
                "joined": [{"rank": rank, "pod": pods[rank]} for rank in new],
                "pause_s": round(time.monotonic() - self._noticed, 3),
                "at": time.time() - (time.monotonic() - self._noticed),
                "phases": life.spent.by_phase(),
                "since_s": round(self._noticed - life.spent.met, 3),
            }
        before = life.clock.micros()
        event = world.broadcast_value(event, giver)  # all ranks
        # from here on all seconds belong to the new world, even if it ends before its first step
        life.spent.enter(world, before)
        self._pods, self._how = dict(zip(view.ids, world.pods, strict=True)), {}
        self._noticed = None
        self.save_soon |= any(it["how"].startswith(TOLD) for it in event["lost"])
        if is_new:
            self._take_over(event, view)
            return
        life.live.keep_event(event, life.step)
        if life.recorder:
            life.recorder.moved(event)
        elif self.takeover:
            self.takeover.events.append(event)

    def _take_over(self, event: dict[str, Any], view: View) -> None:
        """All ranks keep the old rank 0's `end` event; the new rank 0 takes over the records."""
        life = self._life
        end = {it: event[it] for it in ("time", "generation", "step", "at", "phases", "since_s")}
        lost = moves.lost(event) or "rank 0 gave up the run, because it had no majority"
        cause = f"after step {event['step']}: {lost}"
        end |= {"event": "end", "cause": cause, "survived": True}
        known = [(it["event"], it["generation"]) for it in life.live.events]
        if ("end", life.generation) not in known:
            life.live.keep_event(end, life.step)
        if self._world.rank == 0:
            lease, self._lease = self._lease, None
            self.takeover = Takeover(life, event, end, lease, follows=view.by != "lease")

    # -- in a world --------------------------------------------------------------------------------

    @property
    def is_small(self) -> bool:
        """Are there fewer pods than the job needs? Then no rank trains."""
        members = self._world.members
        return members is not None and self._world.world_size < members.least

    @property
    def save_within_s(self) -> float:
        """Most seconds from the last save to the next."""
        members = self._world.members
        if self.save_soon:
            return 0.0
        world = self._world
        alone = members is not None and world.nodes == 1 and world.world_size < members.most
        return ALONE_S if alone else math.inf  # no other pod has the state

    def _wait(self) -> None:
        """All ranks: while the world is too small, save the state, and train nothing."""
        life, within_s = self._life, 0.0
        if self.is_small:
            live.phase("waiting for more pods")
            life.check_replicas()  # all ranks
        while self.is_small and not self.ends and not life.cause:
            life.clock.enter("other")
            time.sleep(_POLL_S)
            self.take_records()
            if life.recorder:
                saves = life.recorder.saves
                saves.watch()
                if not saves.writer.has(life.step) and saves.is_due(within_s):
                    within_s = ALONE_S
                    life.save()
            self.meet()  # all ranks

    def meet(self) -> None:
        """All ranks, between two steps: agree whether the life stops, or the world ends."""
        asked, late = self.stops()
        flags = torch.tensor([asked, late, self.has_news()], dtype=torch.int64)
        asks, lates, news = self._world.all_reduce(flags).tolist()  # all ranks
        self.agreed(asks, lates, asked, news)

    def has_news(self) -> bool:
        """Is there a newer view? The ranks agree on the answer before a step."""
        members, view = self._world.members, self._world.view
        return members is not None and view is not None and members.has_news(view)

    def stops(self) -> tuple[bool, bool]:
        """Was this rank asked to stop? Over _ALL_S ago, so that a request to all has come?"""
        stop = self._life.stop
        return stop.asked, stop.asked and (self._world.is_static or stop.waited_s > _ALL_S)

    def agreed(self, asked: int, late: int, mine: bool, news: int) -> None:
        """All ranks: act on the sums over all ranks; `mine`: this rank was asked to stop.

        Raises Stopped on ranks that stop while others continue.
        """
        life, world = self._life, self._world
        if asked == world.world_size or (asked and world.is_static):
            life.cause = "stopped"
        elif late and mine:
            assert world.members
            if life.recorder:
                life.recorder.lease.close()
            world.members.leave(TOLD)  # before its files are closed, which a slow disk delays
            how = f"{life.stop.cause} after step {life.step}; the others continue"
            log.info("[rank %d] %s", world.rank, how)
            raise Stopped(how)
        self.ends = bool(news or late) and not life.cause

    @contextmanager
    def last_words(self) -> Iterator[None]:
        """All ranks, after the last save: ignore a lost rank, because it has seen the end too."""
        self.life_is_over = True
        try:
            yield
        except Exception as error:
            if self._world.is_static or not is_lost_peer(error):
                raise
        if self._world.members:
            self._world.members.leave(AT_END)

    def take_records(self) -> None:
        """On a new rank 0, once it has the records: add what has happened during the takeover."""
        if self.takeover and (recorder := self.takeover.recorder()):
            taken, self.takeover, self._life.recorder = self.takeover, None, recorder
            taken.catch_up(recorder)

    def wait_for_records(self) -> None:
        """All ranks: wait until rank 0 has the records. Raises OSError after ten minutes."""
        began = time.monotonic()
        while True:
            self.take_records()
            late = time.monotonic() - began > WAIT_S
            flags = torch.tensor([self.takeover is not None, late], dtype=torch.int64)
            waits, lates = self._world.all_reduce(flags).tolist()  # all ranks
            if not waits:
                return
            if lates:
                raise OSError(errno.EIO, "rank 0 cannot take over the records: see its log")
            time.sleep(_POLL_S)
