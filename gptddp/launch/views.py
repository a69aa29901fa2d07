"""Which workers form the world: how launchers agree on *views*. No I/O, and no clock of its own.

Each launcher (*agent*) says all it knows in one *row*, a JSON object, and keeps the newest row of
every other. The leader, the first member of the last view that lives, proposes the next one. It
commits it once every member has accepted it, and everybody in it takes it from a row.

- Proof of a loss: the agent is dead, or says that its worker ended, left or is stopped. Silence of
  SILENT_S is none: then more than half of those not proven lost have to be in the next view. So it
  is with the last view, and with each proposal that anybody has accepted since, which may have been
  committed. Where that fails, the leader's worker must hold the run's lease first.
- An agent accepts ascending numbers only, so no number has two views that share a member; and two
  that share none cannot both have a majority.
- A first view needs no majority: who begins a life takes the lease. A view of workers that are
  going ends one of workers that are not, and of two that are going the higher number stays: those
  who are not in it are *out*, and come back as joiners.
"""

import re
from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]  # rows, views, proposals and members

SILENT_S = 4.0  # of the listener's own running time, until an agent is taken for lost
FORGOTTEN_S = 15.0  # of silence, until a world is taken to have ended: longer than a lease lasts
CALM_S = 2.0  # without news, until a first view may be smaller than the job asks for
STARTING_S = 60.0  # that a first view waits for workers which are not ready yet
KEPT = 256  # of the ends of agents and workers, the newest


def ids(view: Json | None) -> list[str]:
    """The ids of the members of a view or proposal, by rank."""
    return [member["id"] for member in view["members"]] if view else []


def number(view: Json | None) -> int:
    """The number of a view or proposal; 0 for none."""
    return view["number"] if view else 0


def by_address(row: Json) -> list[Any]:
    """A key that sorts `x-2` before `x-10`."""
    parts = re.split(r"(\d+)", row["address"])
    return [int(part) if n % 2 else part for n, part in enumerate(parts)]


class Views:
    """What one agent knows and says. Call `step` after each change, and `tick` ten times a second.

    `row` is what the others are to be told. For the own worker: `row["view"]`, `lost`, `is_going`,
    `question` (the lease that it is asked for) and `out` (the number of the view that is without
    it, once it is known).
    """

    def __init__(self, agent: str, address: str, least: int, most: int) -> None:
        """`address`: HOST:PORT; `least` and `most`: members of a first view."""
        self.least, self.most = least, most
        self.row: Json = {
            "agent": agent,
            "address": address,
            "member": None,  # {"id", "pod", "status"} of the worker
            "ended": {},  # how earlier workers ended, by id
            "dead": {},  # how other agents ended
            "view": None,  # the newest that a worker of this agent was in
            "accepted": [],  # proposals since
            "proposal": None,
            "broken": 0,  # the number of the view that does not work, though nobody may be lost
            "hears": [],  # agents
        }
        self.rows: dict[str, Json] = {agent: self.row}
        self.out = 0
        self.is_expelled = False  # does another agent take this one for dead? Then be a new one
        self._agent = agent
        self._silent_s: dict[str, float] = {}
        self._known: dict[tuple[int, str], Json] = {}  # proposals that anybody has accepted
        self._newest = 0  # the highest number that was seen anywhere
        self._held = 0  # the proposal for which the own worker holds the lease
        self._seen: list[Any] = []  # the workers that are there, as they were at the last tick
        self._calm_s = self._enough_s = 0.0

    # -- what happens ------------------------------------------------------------------------------

    def attach(self, member: Json | None, how: str = "its process ended") -> None:
        """Another worker, or none, takes the place of the last one, which ended so."""
        if last := self.row["member"]:
            self._keep(self.row["ended"], last["id"], how)
        self.row["member"] = member
        self.out = 0

    def hear(self, row: Json) -> None:
        """A row of another agent; one that is known to be dead is not heard."""
        agent = row["agent"]
        if agent in self.row["dead"] or agent == self._agent:
            return
        for other in [*self.rows.values()]:
            if other["address"] == row["address"] and other["agent"] != agent:
                self.died(other["agent"], "another launcher has taken its place")
        self.rows[agent] = row
        self._note(row)
        self.beat(agent)
        for dead, how in row["dead"].items():
            self.died(dead, how)

    def beat(self, agent: str) -> None:
        """The agent lives, and its row is as it was."""
        self._silent_s[agent] = 0.0

    def died(self, agent: str, how: str) -> None:
        """There is proof that this agent ended, and its worker with it."""
        if agent == self._agent:
            self.is_expelled = True
        elif agent not in self.row["dead"]:
            self._keep(self.row["dead"], agent, how)
            if row := self.rows.pop(agent, None):  # what it last said of its worker is said on
                for member, end in row["ended"].items():
                    self._keep(self.row["ended"], member, end)

    def tick(self, seconds: float) -> None:
        """So much time has passed in which this process was running."""
        for agent in {*self.rows, *(m["agent"] for m in self._members())} - {self._agent}:
            self._silent_s[agent] = self._silent_s.get(agent, 0.0) + seconds
        there = sorted((row["agent"], row["member"]) for row in self._living() if row["member"])
        self._calm_s = self._calm_s + seconds if there == self._seen else 0.0
        self._seen = [(agent, dict(member)) for agent, member in there]
        self._enough_s += seconds
        needed = {member["agent"] for member in self._members()}
        for agent, silent_s in [*self._silent_s.items()]:
            if silent_s > 4 * FORGOTTEN_S and agent not in needed:
                self.rows.pop(agent, None)
                del self._silent_s[agent]

    def answer(self, number: int, held: bool) -> None:
        """The own worker's answer to `question`."""
        if held:
            self._held = number

    def step(self) -> None:
        """Draw the conclusions from what is known now."""
        self.row["hears"] = sorted(row["agent"] for row in self._living() if row is not self.row)
        self._adopt()
        self._propose()
        self._accept()
        self._commit()

    def _note(self, row: Json) -> None:
        for one in row["accepted"]:
            self._known[one["number"], one["leader"]] = one
        seen = [row["view"], row["proposal"], *row["accepted"]]
        self._newest = max(self._newest, *map(number, seen))

    # -- what is so --------------------------------------------------------------------------------

    @property
    def is_going(self) -> bool:
        """Is a worker in a view, of which it or another agent that lives has told?"""
        living = [r for r in self.rows.values() if self.silence(r["agent"]) < FORGOTTEN_S]
        return any(self._is_in(row) for row in living)

    @property
    def lost(self) -> dict[str, str]:
        """The members of the own view that are known to have ended, and how."""
        members = self._members() if self.is_in else []
        return {m["id"]: how for m in members if (how := self._end(m))}

    @property
    def question(self) -> Json | None:
        """The lease that the own worker is to take, for a proposal that lacks nothing else."""
        mine = self.row["proposal"]
        how = self._lacks(mine) if mine and mine["number"] != self._held else ""
        return {"number": mine["number"], "how": how} if how and self._is_accepted(mine) else None

    @property
    def is_in(self) -> bool:
        """Is the own worker in `row["view"]`?"""
        return self._is_in(self.row)

    def _is_in(self, row: Json) -> bool:
        return row["member"] is not None and row["member"]["id"] in ids(row["view"])

    def _members(self) -> list[Json]:
        return self.row["view"]["members"] if self.row["view"] else []

    def silence(self, agent: str) -> float:
        """For how many seconds an agent has not been heard."""
        return self._silent_s.get(agent, 0.0)

    def _living(self) -> list[Json]:
        return [row for row in self.rows.values() if self.silence(row["agent"]) < SILENT_S]

    def _status(self, row: Json | None) -> str:
        return row["member"]["status"] if row and row["member"] else ""

    def _end(self, member: Json) -> str:
        """How a member ended for good; empty where there is no proof."""
        row = self.rows.get(member["agent"], self.row)
        end = row["ended"].get(member["id"], "") or self.row["ended"].get(member["id"], "")
        return end or self.row["dead"].get(member["agent"], "")

    def _proof(self, member: Json) -> str:
        """How a member is lost by its own launcher's word, or for good."""
        row = self.rows.get(member["agent"])
        is_stopped = row and self._status(row) == "stopped" and row["member"]["id"] == member["id"]
        return self._end(member) or ("its process is stopped" if is_stopped else "")

    def _keep(self, where: dict[str, str], key: str, how: str) -> None:
        where.setdefault(key, how)
        while len(where) > KEPT:
            del where[next(iter(where))]

    def _hear_each_other(self, one: Json, other: Json) -> bool:
        """What is not known is not held against them."""
        a, b = one["agent"], other["agent"]
        if a == b:
            return True
        rows = self.rows.get(a), self.rows.get(b)
        return all(x is None or y in x["hears"] for x, y in zip(rows, (b, a), strict=True))

    def _together(self, members: Iterable[Json]) -> list[Json]:
        """Those who all hear each other: who misses most goes first, of equals the last one."""
        kept = list(members)
        while True:
            deaf = [sum(not self._hear_each_other(a, b) for b in kept) for a in kept]
            if not any(deaf):
                return kept
            del kept[max(range(len(kept)), key=lambda n: (deaf[n], n))]

    # -- agreement ---------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Take the newest view that the own worker is in, or learn that it is out."""
        member = self.row["member"]
        if member is None:
            return
        for row in self.rows.values():
            view, mine = row["view"], self.row["view"]
            if number(view) > number(mine) and member["id"] in ids(view):
                self._enter(view)
        if not self.is_in:
            return
        for row in [r for r in self.rows.values() if self._is_in(r)]:
            if member["id"] not in ids(row["view"]) and self._goes_before(row):
                self.attach(None, "it was left out of a view")
                self.out = row["view"]["number"]
                return

    def _goes_before(self, row: Json) -> bool:
        """Is the view of this row the one that stays, of it and the own?"""
        rows, views = (row, self.row), (row["view"], self.row["view"])
        going = [self._status(one) in ("going", "stopped") for one in rows]
        if going[0] != going[1] and views[0]["root"] != views[1]["root"]:
            return going[0]
        ranks = [(v["number"], len(v["members"]), v["leader"]) for v in views]
        return ranks[0] > ranks[1]

    def _enter(self, view: Json) -> None:
        self.row["view"], self.row["proposal"] = view, None
        self.row["accepted"] = [p for p in self.row["accepted"] if number(p) > number(view)]
        self._known = {key: p for key, p in self._known.items() if key[0] > number(view)}

    def _propose(self) -> None:
        wanted = self._next() if self.is_in else self._first()
        mine, base = self.row["proposal"], number(self.row["view"])
        if not wanted:
            self.row["proposal"] = None
        elif mine is None or mine["base"] != base or ids(mine) != ids({"members": wanted}) or (
            self._is_refused(mine)
        ):  # fmt: skip
            self._newest += 1
            root = f"{self._newest}.{self._agent}"  # the first view that the later ones come from
            self.row["proposal"] = {
                "number": self._newest,
                "leader": self._agent,
                "base": base,
                "by": "quorum" if self.is_in else "first",
                "root": self.row["view"]["root"] if self.is_in else root,
                "members": wanted,
                "gone": self._gone(wanted),
            }

    def _next(self) -> list[Json]:
        """The members of the next view, if this agent leads to it; none: it stays as it is."""
        last = self._members()
        there = [m for m in last if not self._proof(m) and self.silence(m["agent"]) < SILENT_S]
        there = self._together(there)
        if not there or there[0]["agent"] != self._agent:
            return []
        rows = [self.rows.get(m["agent"]) for m in there]
        joiners: list[Json] = []
        if all(self._status(row) == "going" for row in rows):
            for row in sorted(self._living(), key=by_address):
                new = [self._member(row)] if self._status(row) == "warm" else []
                if new and len(self._together([*there, *joiners, *new])) > len(there + joiners):
                    joiners += new
        joiners = joiners[: max(0, self.most - len(there))]
        is_broken = any(row and row["broken"] == number(self.row["view"]) for row in rows)
        return [*there, *joiners] if len(there) < len(last) or joiners or is_broken else []

    def _first(self) -> list[Json]:
        """The members of a first view, if this agent leads to it and there are enough."""
        rows = sorted((r for r in self._living() if self._status(r) == "fresh"), key=by_address)
        there = self._together(map(self._member, rows))
        leads = there and there[0]["agent"] == self._agent and not self.is_going
        if not leads or len(there) < self.least:
            self._enough_s = 0.0
            return []
        are_late = any(self._status(row) != "fresh" for row in self._living())
        calm = self._calm_s >= CALM_S and (not are_late or self._enough_s >= STARTING_S)
        return there[: self.most] if calm or len(there) >= self.most else []

    def _member(self, row: Json) -> Json:
        member = row["member"]
        return {"id": member["id"], "pod": member["pod"], "agent": row["agent"]}

    def _gone(self, wanted: list[Json]) -> list[Json]:
        """Who of the last view is not in the next, and why; and before them those of views before:
        not everybody has seen each view."""
        stay = ids({"members": wanted})
        before = self.row["view"]["gone"] if self.row["view"] else []
        gone = [m for m in self._members() if m["id"] not in stay]
        now = [{"id": m["id"], "pod": m["pod"], "how": self._why(m)} for m in gone]
        return [*before, *now][-KEPT:]

    def _why(self, member: Json) -> str:
        silent_s = self.silence(member["agent"])
        quiet = f"its pod was silent for {silent_s:.0f} s" if silent_s >= SILENT_S else ""
        return self._proof(member) or quiet or "not all of the others can be reached from its pod"

    def _is_refused(self, mine: Json) -> bool:
        for member in mine["members"]:
            accepted = (
                self.rows[member["agent"]]["accepted"] if member["agent"] in self.rows else []
            )
            highest = max(map(number, accepted), default=0)
            if highest >= mine["number"] and not self._has(accepted, mine):
                return True
        return False

    def _has(self, accepted: list[Json], one: Json) -> bool:
        return any((p["number"], p["leader"]) == (one["number"], one["leader"]) for p in accepted)

    def _accept(self) -> None:
        """Accept the highest proposal that is above all before, and fits what the worker is in."""
        accepted, status = self.row["accepted"], self._status(self.row)
        least = max([number(self.row["view"]), *map(number, accepted)])
        proposals = [row["proposal"] for row in self.rows.values() if row["proposal"]]
        for one in sorted(proposals, key=number, reverse=True):
            if self.is_in:
                fits = one["by"] == "quorum" and one["base"] == number(self.row["view"])
            elif one["by"] == "first":
                fits = status == "fresh" and not self.is_going
            else:
                fits = status == "warm"
            if fits and number(one) > least and self.row["member"]["id"] in ids(one):
                others = [p for p in accepted if ids(p) != ids(one)]
                self.row["accepted"] = [*others, one]
                self._note(self.row)
                return

    def _is_accepted(self, mine: Json) -> bool:
        agents = [member["agent"] for member in mine["members"]]
        return all(a in self.rows and self._has(self.rows[a]["accepted"], mine) for a in agents)

    def _lacks(self, mine: Json) -> str:
        """What stands against committing: "tie", "minority", or nothing."""
        if mine["by"] == "first":
            return ""
        own, worst = ids(mine), ""
        known = [p for p in self._known.values() if p["leader"] != self._agent]  # else I knew it
        known = [p for p in known if number(p) > number(self.row["view"])]
        for base in [self.row["view"], *known]:
            alive = [m["id"] for m in base["members"] if not self._proof(m)]
            stay = sum(m in own for m in alive)
            if 2 * stay < len(alive):
                return "minority"
            worst = "tie" if alive and 2 * stay == len(alive) else worst
        return worst

    def _commit(self) -> None:
        mine = self.row["proposal"]
        if mine is None or not self._is_accepted(mine):
            return
        how = self._lacks(mine)
        if how and self._held != mine["number"]:
            self.row["broken"] = mine["base"]  # the worker leaves its group to answer
            return
        view = {key: mine[key] for key in ("number", "leader", "root", "members", "gone")}
        self._enter({**view, "by": "lease" if how else mine["by"]})
