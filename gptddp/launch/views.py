"""How launchers agree on *views*: the workers that form the world. No I/O, and no clock.

Each launcher (*agent*) puts all it knows into one *row*, a JSON object, and keeps the newest row of
every other agent. The leader, the first living member of the last view, proposes the next view. It
commits the proposal once every member has accepted it, and every member takes the view from a row.

- Proof of a loss: the agent is dead, or reports that its worker ended, left, is stopped or does not
  join. Silence of SILENT_S is no proof: then the next view needs more than half of the members of
  the last view that are not proven lost. The same holds for each newer view of this world that
  another row has, and for each proposal that an agent has accepted since, while its leader may
  commit it. With fewer, the leader's worker must take the lease first.
- An agent accepts ascending numbers only: of two views of one number only one has a majority.
- A first view needs no majority: its rank 0 takes the lease. Of two worlds that meet, the one that
  trains stays; of two views of one world, the higher number. A worker not in it is *out*.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from gptddp.distributed.members import SILENT_S
from gptddp.launch.rows import Json, by_address, ids, is_member, key, number, status

FORGOTTEN_S = 15.0  # of silence, until a world counts as ended: longer than a lease lasts
CALM_S = 2.0  # without changes, until a first view may be smaller than the job asks for
STARTING_S = 60.0  # limit of a first view's wait for workers that are not ready yet
UNFIT = {"stopped": "its process is stopped", "late": "it was admitted and did not join"}
KEPT = 32  # ends of agents and of workers to keep, besides one for each worker of the job


class Views:
    """The knowledge of one agent. Call `step` after each change, and `tick` ten times a second.

    `row` is for the others. For the own worker: `row["view"]`, `lost`, `is_going`, `question` (the
    lease it is asked for) and `out` (the number of the view that lacks it).
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
            "view": None,  # the newest view with a worker of this agent
            "accepted": [],  # proposals that this agent has accepted since
            "proposal": None,
            "broken": 0,  # the number of a view that fails, even without a known loss
            "hears": [],  # agents
        }
        self.rows: dict[str, Json] = {agent: self.row}
        self.out = 0
        self.is_expelled = False  # another agent counts this one as dead: become a new agent
        self._agent = agent
        self._silent_s = defaultdict[str, float](float)  # seconds since each agent was heard
        self._known: dict[tuple[int, str], Json] = {}  # proposals accepted by any agent
        self._newest = 0  # the highest number seen in any row
        self._held = 0  # the proposal for which the own worker holds the lease
        self._seen: list[Any] = []  # the present workers, as of the last tick
        self._calm_s = self._enough_s = self._minor_s = 0.0

    def attach(self, member: Json | None, how: str) -> None:
        """Set another worker, or None; `how`: the end of the last worker."""
        if last := self.row["member"]:
            self._keep(self.row["ended"], last["id"], how)
        self.row["member"], self.out = member, 0

    def hear(self, row: Json) -> None:
        """Take a row of another agent, unless that agent is known to be dead, or has to wait."""
        agent = row["agent"]
        if agent in self.row["dead"] or agent == self._agent:
            return
        for other in [*self.rows.values()]:
            if other["address"] == row["address"] and other["agent"] != agent:
                # a pod that was deleted by force may still live: the new one of its name waits
                stays = other is self.row or is_member(other) or not is_member(row)
                if stays and self._silent_s[other["agent"]] < SILENT_S:
                    return
                self.died(other["agent"], "another launcher has taken its place")
        self.rows[agent] = row
        self._note(row)
        self._silent_s[agent] = 0.0
        # only deaths that matter here: `_keep` drops old ones in different orders, and agents would
        # send all others to each other for ever
        views = [self.row["view"], *self._known.values()]
        needed = {member["agent"] for view in filter(None, views) for member in view["members"]}
        for dead in row["dead"].keys() & (self.rows.keys() | needed):
            self.died(dead, row["dead"][dead])

    def died(self, agent: str, how: str) -> None:
        """There is proof that this agent ended, and its worker with it."""
        if agent == self._agent:
            self.is_expelled = True
        elif agent not in self.row["dead"]:
            self._keep(self.row["dead"], agent, how)
            row = self.rows.pop(agent, {"ended": {}})  # pass on the ends of its workers
            for member, end in row["ended"].items():
                self._keep(self.row["ended"], member, end)

    def tick(self, seconds: float) -> None:
        """Let this much time pass, in which this process was running."""
        needed = {member["agent"] for member in self._members()}
        silent_s = {agent: self._silent_s[agent] + seconds for agent in {*self.rows, *needed}}
        self._silent_s = defaultdict(float, silent_s | {self._agent: 0.0})
        for agent in self.rows.keys() - needed:
            if self._silent_s[agent] > 4 * FORGOTTEN_S:
                del self.rows[agent]
        there = [(row["agent"], dict(row["member"])) for row in self._living() if row["member"]]
        self._calm_s = self._calm_s + seconds if there == self._seen else 0.0
        self._seen, self._enough_s = there, self._enough_s + seconds
        self._minor_s = self._minor_s + seconds if self._needed() == "minority" else 0.0

    def answer(self, number: int) -> None:
        """Note that the own worker has taken the lease that it was asked for."""
        self._held = number

    def step(self) -> None:
        """Draw the conclusions from the present knowledge."""
        self.row["hears"] = sorted(row["agent"] for row in self._living() if row is not self.row)
        self._adopt()
        self._propose()
        self._accept()
        self._commit()

    @property
    def is_in(self) -> bool:
        """Is the own worker in `row["view"]`?"""
        return is_member(self.row)

    @property
    def is_going(self) -> bool:
        """Does any living agent have a worker in its view?"""
        return any(map(is_member, self._living(FORGOTTEN_S)))

    @property
    def lost(self) -> dict[str, str]:
        """How members of the last view ended, for all known ends."""
        return {m["id"]: how for m in self._members() if (how := self._end(m))}

    @property
    def question(self) -> Json | None:
        """The lease that the own worker must take, for a proposal that lacks nothing else."""
        mine, how = self.row["proposal"], self._needed()
        is_due = how == "tie" or self._minor_s >= CALM_S  # until then it may learn that it is out
        return {"number": mine["number"], "how": how} if how and is_due else None

    def _needed(self) -> str | None:
        """Why the own proposal needs the lease, or ""; None until all members have accepted it."""
        mine = self.row["proposal"]
        rows = [self.rows.get(member["agent"]) for member in mine["members"]] if mine else [None]
        if not all(row and key(mine) in map(key, row["accepted"]) for row in rows):
            return None
        return "" if mine["number"] == self._held else self._lacks(mine)

    def _keep(self, where: dict[str, str], name: str, how: str) -> None:
        where.setdefault(name, how)
        while len(where) > KEPT + self.most:
            del where[next(iter(where))]

    def _living(self, limit_s: float = SILENT_S) -> list[Json]:
        return [row for row in self.rows.values() if self._silent_s[row["agent"]] < limit_s]

    def _members(self) -> list[Json]:
        return self.row["view"]["members"] if self.row["view"] else []

    def _end(self, member: Json) -> str:
        """How a member ended for good; empty where there is no proof."""
        agent, row = member["agent"], self.rows.get(member["agent"], self.row)
        how: dict[str, str] = {**self.row["dead"], **self.row["ended"], **row["ended"]}
        return how.get(member["id"], how.get(agent, ""))

    def _proof(self, member: Json) -> str:
        """How a member is lost: for good, or by its launcher's report."""
        row = self.rows.get(member["agent"])
        is_there = row and row["member"] and row["member"]["id"] == member["id"]
        return self._end(member) or (UNFIT.get(status(row), "") if is_there else "")

    def _together(self, members: Iterable[Json]) -> list[Json]:
        """Members that all hear each other; drop the one that misses most, of equals the last."""
        kept = list(members)
        while True:
            agents, deaf = {member["agent"] for member in kept}, Counter[str]()
            for agent in agents & self.rows.keys():  # the others have no row
                missed = agents - {agent} - {*self.rows[agent]["hears"]}
                deaf.update([*missed, *[agent] * len(missed)])
            if not deaf:
                return kept
            del kept[max(range(len(kept)), key=lambda n: (deaf[kept[n]["agent"]], n))]

    def _note(self, row: Json) -> None:
        self._known.update({key(one): one for one in row["accepted"]})
        seen = [row["view"], row["proposal"], *row["accepted"]]
        self._newest = max(self._newest, *map(number, seen))

    def _adopt(self) -> None:
        """Take the newest view with the own worker, or learn that the worker is out."""
        member, own = self.row["member"], self.row
        for row in self.rows.values() if member else ():
            if number(row["view"]) > number(own["view"]) and member["id"] in ids(row["view"]):
                self._enter(row["view"])
        for row in filter(is_member, self.rows.values() if self.is_in else ()):
            if member["id"] not in ids(row["view"]) and self._goes_before(row):
                self.attach(None, "it was left out of a view")
                self.out = number(row["view"])
                return

    def _goes_before(self, row: Json) -> bool:
        """Does the view of this row stay, and not the own view?"""
        other, own = row["view"], self.row["view"]
        going = [status(one) in ("going", *UNFIT) for one in (row, self.row)]
        if going[0] != going[1] and other["root"] != own["root"]:
            return going[0]
        ranks = [(v["number"], len(v["members"]), v["leader"]) for v in (other, own)]
        return ranks[0] > ranks[1]

    def _enter(self, view: Json) -> None:
        self.row["view"], self.row["proposal"] = view, None
        self.row["accepted"] = [p for p in self.row["accepted"] if number(p) > number(view)]
        self._known = {k: p for k, p in self._known.items() if number(p) > number(view)}

    def _propose(self) -> None:
        wanted = self._next() if self.is_in else self._first()
        mine, view = self.row["proposal"], self.row["view"]
        same = mine and mine["base"] == number(view) and mine["members"] == wanted
        if not wanted:
            self.row["proposal"] = None
        elif not same or self._is_refused(mine):
            self._newest += 1
            self.row["proposal"] = {
                "number": self._newest,
                "leader": self._agent,
                "base": number(view),
                "by": "quorum" if self.is_in else "first",
                # identity of the world: the first view from which it comes
                "root": view["root"] if self.is_in else f"{self._newest}.{self._agent}",
                "members": wanted,
                "gone": self._gone(ids({"members": wanted})),
            }

    def _next(self) -> list[Json]:
        """The members of the next view, if this agent leads it; empty: the view stays."""
        last = self._members()
        there = [m for m in last if not self._proof(m) and self._silent_s[m["agent"]] < SILENT_S]
        there = self._together(there)
        if not there or there[0]["agent"] != self._agent:
            return []
        rows, wanted = [self.rows.get(member["agent"]) for member in there], there
        if all(status(row) == "going" for row in rows):
            for row in sorted((r for r in self._living() if status(r) == "warm"), key=by_address):
                more = [*wanted, self._member(row)]
                wanted = more if self._together(more) == more and len(more) <= self.most else wanted
        is_broken = any(row and row["broken"] == number(self.row["view"]) for row in rows)
        return wanted if wanted != last or is_broken else []

    def _first(self) -> list[Json]:
        """The members of a first view, if this agent leads it and there are enough."""
        rows = sorted((r for r in self._living() if status(r) == "fresh"), key=by_address)
        there = self._together(map(self._member, rows))
        leads = there and there[0]["agent"] == self._agent and not self.is_going
        if not leads or len(there) < self.least:
            self._enough_s = 0.0
            return []
        is_ready = all(status(row) == "fresh" for row in self._living())
        calm = self._calm_s >= CALM_S and (is_ready or self._enough_s >= STARTING_S)
        return there[: self.most] if calm or len(there) >= self.most else []

    def _member(self, row: Json) -> Json:
        member = row["member"]
        return {"id": member["id"], "pod": member["pod"], "agent": row["agent"]}

    def _gone(self, stay: list[str]) -> list[Json]:
        """Members lost at this view, and why; and earlier losses that some agents may not know."""
        gone = list(self.row["view"]["gone"]) if self.row["view"] else []
        for member in [m for m in self._members() if m["id"] not in stay]:
            silent_s = self._silent_s[member["agent"]]
            quiet = f"its pod was silent for {silent_s:.0f} s" if silent_s >= SILENT_S else ""
            how = self._proof(member) or quiet or "its pod and another do not hear each other"
            gone.append({"id": member["id"], "pod": member["pod"], "how": how})
        return gone[-KEPT - self.most :]

    def _is_refused(self, mine: Json) -> bool:
        """Does a view, or another proposal that a member has accepted, have this number or more?"""
        rows = [self.rows.get(member["agent"], {"accepted": []}) for member in mine["members"]]
        others = [row["accepted"] for row in rows if key(mine) not in map(key, row["accepted"])]
        rivals = [row["view"] for row in self.rows.values()] + sum(others, [])
        return any(number(one) >= number(mine) for one in rivals)

    def _accept(self) -> None:
        """Accept the highest proposal above all earlier ones that fits the worker's view."""
        accepted, own = self.row["accepted"], self.row
        least = max([number(own["view"]), *map(number, accepted)])
        proposals = [row["proposal"] for row in self.rows.values() if row["proposal"]]
        for one in sorted(proposals, key=number, reverse=True):
            if self.is_in:
                fits = one["by"] == "quorum" and one["base"] == number(own["view"])
            elif one["by"] == "first":
                fits = status(own) == "fresh" and not self.is_going
            else:
                fits = status(own) == "warm"
            if fits and number(one) > least and own["member"]["id"] in ids(one):
                own["accepted"] = [p for p in accepted if ids(p) != ids(one)] + [one]
                self._note(own)
                return

    def _lacks(self, mine: Json) -> str:
        """The obstacle to a commit: "tie", "minority", or empty.

        Members of this world may have formed a newer view without this worker: it counts too.
        """
        if mine["by"] != "quorum":
            return ""
        last, own, worst = self.row["view"], ids(mine), ""
        views = [row["view"] for row in self.rows.values() if number(row["view"]) > number(last)]
        newer = [view for view in views if view["root"] == last["root"]]
        rivals = [p for p in self._known.values() if self._may_be_committed(p, mine)]
        for base in [last, *newer, *rivals]:
            alive = [m["id"] for m in base["members"] if not self._proof(m)]
            stay = sum(member in own for member in alive)
            if 2 * stay < len(alive):
                return "minority"
            worst = "tie" if alive and 2 * stay == len(alive) else worst
        return worst

    def _may_be_committed(self, one: Json, mine: Json) -> bool:
        """May this proposal be a view, now or later? All members have accepted `mine`.

        Only its leader commits it, as long as it stands in the leader's row. So it is no view if
        its leader is a member of `mine` and has replaced it: that leader has accepted `mine`, so
        its next proposals have higher numbers. But if its base is newer than the own view, it
        counts: it may be the only trace of that base.
        """
        last = number(self.row["view"])
        if number(one) <= last:
            return False
        agents = {member["agent"] for member in mine["members"]}
        if one["leader"] not in agents or number(one) > number(mine) or one["base"] > last:
            return True
        row = self.rows[one["leader"]]
        stands = row["proposal"] is not None and key(row["proposal"]) == key(one)
        return stands or number(row["view"]) >= number(one)

    def _commit(self) -> None:
        mine = self.row["proposal"]
        if self.question:
            self.row["broken"] = mine["base"]  # the worker leaves its group to answer
        elif self._needed() == "":
            self._enter({**mine, "by": "lease" if self._lacks(mine) else mine["by"]})
